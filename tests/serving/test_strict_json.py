"""How bodies are read, without a network."""

import asyncio
import contextlib
import gc
import json

import pytest

from mlx_t5.serving import strict_json
from mlx_t5.serving.strict_json import StrictRequest


def read(body):
    """The value of a body."""

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return asyncio.run(StrictRequest({"type": "http", "headers": []}, receive).json())


def test_literals():
    assert read(b'{"a": [1, 1.5, true, null, "\xc3\xa9\\ud83d\\ude00"]}') == {
        "a": [1, 1.5, True, None, "é😀"]
    }
    assert read(b"\xef\xbb\xbf{}") == {}, "some programs put a mark before UTF-8"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 15_000,
        b"[NaN]",
        b"[-Infinity]",
        b"9" * 10_000,
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\xed\xa0\x80"',
        b'{"\\udfff": 1}',
        '"x"'.encode("utf-16"),
    ],
)
def test_what_is_not_json(body):
    with pytest.raises(json.JSONDecodeError):
        read(body)


@pytest.mark.parametrize("error", [None, ValueError("not JSON")])
def test_no_garbage_is_collected_while_a_body_is_read(monkeypatch, error):
    enabled = []

    def look(*_, **__):
        enabled.append(gc.isenabled())
        if error:
            raise error

    monkeypatch.setattr(strict_json, "from_json", look)
    with pytest.raises(json.JSONDecodeError) if error else contextlib.nullcontext():
        read(b"{}")
    assert (enabled, gc.isenabled()) == ([False], True)
