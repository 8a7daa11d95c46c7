"""Tests limits on connections and requests, with small applications."""

import asyncio
import gc
import json
import logging
import socket
import threading
import time

import pytest

from mlx_t5.serving import http_server
from mlx_t5.serving.http_server import LimitedConnection, Middleware, Server
from mlx_t5.serving.metrics import Metrics

PATIENCE = 30  # seconds allowed for short waits
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SCOPE = {"type": "http", "method": "POST", "path": "/predict", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.request", "body": b"{}", "more_body": False}


async def app(scope, receive, send):
    await send(START)
    await send({"type": "http.response.body", "body": b"answered"})


@pytest.fixture
def connect(monkeypatch):
    """Returns `connect()`: a new connection to a server that accepts two at a time."""
    monkeypatch.setattr(LimitedConnection, "limit", 2)
    server, opened = Server(app, 1, print), []
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()

    def start():
        opened.append(socket.create_connection(listener.getsockname(), timeout=PATIENCE))
        return opened[-1]

    yield start
    for connection in opened:
        connection.close()
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()


def answer(connection, request=ASK):
    """Sends a request; returns the status and the whole answer."""
    connection.sendall(request)
    received = b""
    while not received.endswith((b"answered", b"}", b"0\r\n\r\n")):
        more = connection.recv(4096)
        assert more, received
        received += more
    return int(received.split()[1]), received


def test_one_connection_too_many_is_refused_until_there_is_room(connect):
    first, second = connect(), connect()
    assert answer(first)[0] == answer(second)[0] == 200
    status, received = answer(connect())
    head, body = received.split(b"\r\n\r\n", 1)
    assert (status, b"connection: close" in head.lower()) == (503, True)
    assert json.loads(body)["error"]["type"] == "server_error"
    assert answer(first)[0] == 200, "who is in stays in"
    second.close()
    end = time.monotonic() + PATIENCE
    while answer(connect())[0] != 200:  # until the server notices that a connection has ended
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("is_reused, begun", [(False, b""), (False, ASK[:10]), (True, ASK[:10])])
def test_incomplete_request_headers_time_out(connect, monkeypatch, is_reused, begun):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.05)
    slow = connect()
    if is_reused:
        assert answer(slow)[0] == 200
    slow.sendall(begun)
    assert slow.recv(1) == b""


def test_a_connection_stays_open_between_two_requests(connect, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.05)
    connection = connect()
    for _ in range(2):
        assert answer(connection)[0] == 200
        time.sleep(0.2)  # uvicorn's timeout_keep_alive is longer


def test_nothing_is_kept_of_a_connection_that_has_ended(connect):
    def kept():
        gc.collect()
        return sum(issubclass(type(it), LimitedConnection) for it in gc.get_objects())

    for _ in range(20):
        connection = connect()
        assert answer(connection)[0] in (200, 503)
        connection.close()
    end = time.monotonic() + PATIENCE
    while kept():
        assert time.monotonic() < end, kept()
        time.sleep(0.01)


def test_a_websocket_request_gets_http_and_logs_no_advice(connect, caplog):
    caplog.set_level(logging.DEBUG)
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert answer(connect(), request)[0] == 200
    assert "ebSocket" not in caplog.text and "pgrade" not in caplog.text


# ---- requests, without a network -----------------------------------------------------------------


def ask(app, receive, send, scope=SCOPE):
    """Handles one request; returns the counted statuses and their paths."""
    metrics = Metrics()
    answer = Middleware(app, None, metrics, {"/predict"})(scope, receive, send)
    asyncio.run(asyncio.wait_for(answer, 5))
    samples = metrics.requests.collect()[0].samples
    return {s.labels["status"]: s.labels["path"] for s in samples if s.name.endswith("_total")}


def answering(message):
    async def answer(*_):
        return message

    return answer


async def unreachable(*_):
    raise AssertionError("it must not come so far")


def test_an_incomplete_body_times_out(monkeypatch):
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.05)
    sent = []

    async def dripping():
        await asyncio.sleep(0.02)
        return {**BODY, "body": b"", "more_body": True}

    async def send(message):
        sent.append(message)

    assert ask(unreachable, dripping, send) == {"408": "/predict"}
    assert json.loads(sent[1]["body"])["error"]["message"].startswith("the body did not arrive")
    assert (b"connection", b"close") in sent[0]["headers"]


def test_an_answer_that_is_not_read_times_out(monkeypatch):
    monkeypatch.setattr(http_server, "SEND_SECONDS", 0.05)
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


def test_a_client_that_leaves_before_its_body_arrives_counts_as_499(monkeypatch):
    gone = answering({"type": "http.disconnect"})
    assert ask(unreachable, gone, answering(None)) == {"499": "/predict"}


def test_a_request_cut_off_by_the_shutdown_is_told_so():
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
