"""Tests how bodies of requests are read, their limits, and the errors for wrong bodies."""

import asyncio
import contextlib
import gc
import json

import pytest
from mlx_t5.serving.middleware import StrictRequest
from pydantic import ValidationError

from mlx_t5.serving import middleware
from mlx_t5.serving.api import ChatRequest, CompletionRequest, PredictRequest
from mlx_t5.serving.api_error import error_of_validation
from mlx_t5.serving.service import several
from mlx_t5.settings import SETTINGS, Settings

MANY = 90_000
TURN = {"role": "user", "content": "x"}


def test_the_description_shows_the_bounds_of_settings():
    shown = PredictRequest.model_json_schema()["properties"]
    bounds = {
        "max_tokens": {"minimum": 1, "maximum": 2**31 - 1},
        "temperature": {"minimum": 0, "maximum": 2},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "seed": {"minimum": 0, "maximum": 2**53 - 1},
        "num_draft": {"minimum": 0, "maximum": 16},
        "delta": {"minimum": 0, "maximum": 1},
    }
    for name, expected in bounds.items():
        first = shown[name]["anyOf"][0]
        assert {word: n for word, n in first.items() if "imum" in word.lower()} == expected, name


def test_a_field_follows_the_range_of_its_setting():
    checked = [s for s in SETTINGS.values() if s.request and s.range.kind is not bool]
    for setting in checked:
        for value in (setting.range.least - 1, setting.range.most * 2, "x", True):
            with pytest.raises(ValidationError):
                PredictRequest.model_validate({"prompt": "x", setting.request: value})


def test_the_fields_of_a_request_become_settings():
    def settings(kind=CompletionRequest, **fields):
        prompt = {"messages": [TURN]} if kind is ChatRequest else {"prompt": "x"}
        return kind.model_validate({**prompt, **fields}).settings

    assert settings() == settings(temperature=None, stop=[]) == {}
    assert settings(temperature=0, stop="a", num_draft="auto") == {
        "temp": 0, "stop": "a", "num_draft": "auto",
    }  # fmt: skip
    assert settings(draft=False, num_draft=3) == {"num_draft": 0}
    beams = {"num_beams": 2, "early_stopping": "never", "length_penalty": 2}
    assert settings(PredictRequest, **beams) == settings(**beams) == beams
    assert settings(ChatRequest, max_tokens=5, max_completion_tokens=3) == {"max_tokens": 3}
    assert settings(ChatRequest, max_completion_tokens=3) == {"max_tokens": 3}


@pytest.mark.parametrize(
    "kind, body",
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY] * 3}),
        (CompletionRequest, {"prompt": [["x"] * MANY] * 3}),
        (CompletionRequest, {"prompt": [[[]] * MANY] * 3}),
        (CompletionRequest, {"prompt": [5] + [""] * MANY}),
        (CompletionRequest, {"prompt": [""] * 64}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)))}),
        (PredictRequest, {"prompt": "x", **dict.fromkeys(map(str, range(MANY)))}),
        (ChatRequest, {"messages": [TURN], "stream_options": {str(i): i for i in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{**TURN, "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{**TURN, **dict.fromkeys(map(str, range(MANY)))}]}),
    ],
)
def test_a_body_that_is_wrong_everywhere_gives_few_errors(kind, body):
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(body)
    assert wrong.value.error_count() <= 2 * 64 + 2
    error = error_of_validation(wrong.value.errors())
    assert error.status == 400 and len(error.body.error.message) < 500


def test_the_first_unknown_field_is_the_one_that_is_named():
    with pytest.raises(ValidationError) as wrong:
        PredictRequest.model_validate({"first": 1, "prompt": "x", "second": 2})
    assert [error["loc"] for error in wrong.value.errors()] == [("first",)]


def test_the_best_n_texts_of_a_search_are_returned():
    body = CompletionRequest.model_validate({"prompt": "x", "early_stopping": "never"})
    assert several(Settings(num_beams=4), body, samples=3).num_return_sequences == 3


# ---- bodies --------------------------------------------------------------------------------------


def read(body):
    """Returns the JSON value of a body."""

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return asyncio.run(StrictRequest({"type": "http", "headers": []}, receive).json())


def test_json_bodies_are_read_with_every_literal():
    assert read(b'{"a": [1, 1.5, true, null, "\xc3\xa9\\ud83d\\ude00"]}') == {
        "a": [1, 1.5, True, None, "é😀"]
    }
    assert read(b"\xef\xbb\xbf{}") == {}, "some programs put a mark before UTF-8"


@pytest.mark.parametrize("error", [None, ValueError("not JSON")])
def test_no_garbage_is_collected_while_a_body_is_read(monkeypatch, error):
    enabled = []

    def look(*_, **__):
        enabled.append(gc.isenabled())
        if error:
            raise error

    monkeypatch.setattr(middleware, "from_json", look)
    with pytest.raises(json.JSONDecodeError) if error else contextlib.nullcontext():
        read(b"{}")
    assert (enabled, gc.isenabled()) == ([False], True)
