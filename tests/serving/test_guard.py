"""What stands in front of the application, without a network."""

import asyncio
import json

import pytest

from mlx_t5.serving import guard
from mlx_t5.serving.guard import Guard
from mlx_t5.serving.metrics import Metrics

SCOPE = {"type": "http", "method": "POST", "path": "/predict", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.request", "body": b"{}", "more_body": False}


def ask(app, receive, send, scope=SCOPE):
    """One request; returns the statuses that were counted."""
    metrics = Metrics()
    answer = Guard(app, None, metrics, {"/predict"})(scope, receive, send)
    asyncio.run(asyncio.wait_for(answer, 5))
    samples = metrics.requests.collect()[0].samples
    return {s.labels["status"]: s.labels["path"] for s in samples if s.name.endswith("_total")}


def answering(message):
    async def answer(*_):
        return message

    return answer


async def unreachable(*_):
    raise AssertionError("it must not come so far")


def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)
    sent = []

    async def dripping():
        await asyncio.sleep(0.02)
        return {**BODY, "body": b"", "more_body": True}

    async def send(message):
        sent.append(message)

    assert ask(unreachable, dripping, send) == {"408": "/predict"}
    assert json.loads(sent[1]["body"])["error"]["message"].startswith("the body did not arrive")
    assert (b"connection", b"close") in sent[0]["headers"]


def test_what_a_client_does_not_read_is_not_kept_for_it(monkeypatch):
    monkeypatch.setattr(guard, "SEND_SECONDS", 0.05)
    ended = []

    async def app(scope, receive, send):
        try:
            await send(START)
        finally:
            ended.append(True)

    async def stuck(message):
        await asyncio.Event().wait()

    assert ask(app, answering(BODY), stuck) == {"200": "/predict"}
    assert ended == [True]


def test_a_client_that_goes_away_before_its_body_has_come(monkeypatch):
    gone = answering({"type": "http.disconnect"})
    assert ask(unreachable, gone, answering(None)) == {"499": "/predict"}


def test_a_request_that_the_end_of_the_server_cuts_off_is_told_so():
    sent = []

    async def cut_off(*_):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    async def send(message):
        sent.append(message)

    assert ask(unreachable, cut_off, send) == {"503": "/predict"}
    error = json.loads(sent[1]["body"])["error"]
    assert error["message"] == "the server is shutting down" and len(sent) == 2


@pytest.mark.parametrize("path", ["/predict", "/a\nERROR forged", "/confidential"])
def test_an_error_is_logged_without_what_the_client_said(caplog, path):
    async def app(scope, receive, send):
        raise ValueError("confidential")

    named = path if path == "/predict" else "other"
    scope = {**SCOPE, "path": path}
    assert ask(app, answering(BODY), answering(None), scope) == {"500": named}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"POST {named} failed: ValueError at ")
    assert not {"confidential", "forged"} & set(record.getMessage().split())
