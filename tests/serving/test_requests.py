"""Tests how bodies of requests are read, their limits, and the errors for wrong bodies."""

import asyncio

import pytest
from pydantic import ValidationError

from mlx_t5.serving.api_error import error_of_validation
from mlx_t5.serving.openai import StrictRequest
from mlx_t5.serving.requests import ChatRequest, CompletionRequest, PredictRequest
from mlx_t5.settings import SETTINGS, Repetition, Settings

MANY = 90_000
TURN = {"role": "user", "content": "x"}


def test_a_field_follows_the_range_of_its_setting():
    checked = [s for s in SETTINGS.values() if s.request and s.range.kind is not bool]
    for setting in checked:
        needed = {"prompt": "x"} | ({"num_beams": 2} if setting.only_with == "beams" else {})
        body = PredictRequest.model_validate(needed | {setting.request: setting.range.least})
        assert Settings(**body.settings), "it can be decoded with"
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
    rules = {"top_k": 3, "min_tokens": 2, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    assert settings(**rules) == settings(PredictRequest, **rules) == rules
    beams = {"num_beams": 2, "early_stopping": "never", "length_penalty": 2}
    assert settings(PredictRequest, **beams) == settings(**beams) == beams
    loops = {"max_pattern_size": 8, "min_count": 3}
    assert settings(repetition_detection=loops) == {"repetition_detection": Repetition(8, 0, 3)}
    for off in (None, {}, {"max_pattern_size": 0}):
        assert (
            settings(PredictRequest, repetition_detection=off)["repetition_detection"]
            == Repetition()
        )
    assert settings(num_beams=2, repetition_detection={"max_pattern_size": 0})["num_beams"] == 2
    assert settings(ChatRequest, max_tokens=5, max_completion_tokens=3) == {"max_tokens": 3}
    assert settings(ChatRequest, max_completion_tokens=3) == {"max_tokens": 3}


@pytest.mark.parametrize(
    "kind, body",
    [
        (CompletionRequest, {"prompt": [[-1] * MANY] * 3}),
        (CompletionRequest, {"prompt": [["x"] * MANY] * 3}),
        (CompletionRequest, {"prompt": [""] * 64}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)))}),
        (PredictRequest, {"prompt": "x", **dict.fromkeys(map(str, range(MANY)))}),
        (ChatRequest, {"messages": [TURN], "stream_options": {str(i): i for i in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{**TURN, **dict.fromkeys(map(str, range(MANY)))}]}),
        (
            PredictRequest,
            {"prompt": "x", "repetition_detection": dict.fromkeys(map(str, range(MANY)))},
        ),
    ],
)
def test_a_body_that_is_wrong_everywhere_gives_few_errors(kind, body):
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(body)
    assert wrong.value.error_count() <= 2 * 64 + 2
    errors = [{**error, "loc": ("body", *error["loc"])} for error in wrong.value.errors()]
    error = error_of_validation(errors, body)
    assert error.status == 400 and len(error.body.error.message) < 500


def test_the_first_unknown_field_is_the_one_that_is_named():
    with pytest.raises(ValidationError) as wrong:
        PredictRequest.model_validate({"first": 1, "prompt": "x", "second": 2})
    assert [error["loc"] for error in wrong.value.errors()] == [("first",)]


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
