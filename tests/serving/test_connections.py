"""Limits on connections, on an application that answers everything."""

import gc
import json
import logging
import socket
import threading
import time

import pytest
import uvicorn

from mlx_t5.serving import connections
from mlx_t5.serving.connections import Connection, most_connections

PATIENCE = 30  # seconds for what takes a moment
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"answered"})


@pytest.fixture
def connect():
    """`connect()`: a new connection to a server that takes two of them."""

    class Two(Connection):
        limit = 2

    config = uvicorn.Config(app, port=0, http=Two, ws="none", lifespan="off", log_config=None)
    server, opened = uvicorn.Server(config), []
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
    """Status and body of the answer to a request."""
    connection.sendall(request)
    received = b""
    while not received.endswith((b"answered", b"}", b"0\r\n\r\n")):
        more = connection.recv(4096)
        assert more, received
        received += more
    return int(received.split()[1]), received


def test_one_connection_too_many_is_told_so_and_there_is_room_again_later(connect):
    first, second = connect(), connect()
    assert answer(first)[0] == answer(second)[0] == 200
    status, received = answer(connect())
    head, body = received.split(b"\r\n\r\n", 1)
    assert (status, b"connection: close" in head.lower()) == (503, True)
    assert json.loads(body)["error"]["type"] == "server_error"
    assert answer(first)[0] == 200, "who is in stays in"
    second.close()
    end = time.monotonic() + PATIENCE
    while answer(connect())[0] != 200:  # until its end has come to be known
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_connection_on_which_nothing_is_asked_is_closed(connect, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    assert connect().recv(1) == b""
    slow = connect()
    slow.sendall(ASK[:10])
    assert slow.recv(1) == b""


def test_one_too_many_that_asks_nothing_is_closed_too(connect, monkeypatch):
    monkeypatch.setattr(connections, "REFUSAL_SECONDS", 0.05)
    first, second = connect(), connect()
    assert answer(first)[0] == answer(second)[0] == 200  # both are known before the third
    assert connect().recv(1) == b""


def test_nothing_is_kept_of_a_connection_that_has_ended(connect):
    def kept():
        gc.collect()
        return sum(issubclass(type(it), Connection) for it in gc.get_objects())

    for _ in range(20):
        connection = connect()
        assert answer(connection)[0] in (200, 503)
        connection.close()
    end = time.monotonic() + PATIENCE
    while kept():
        assert time.monotonic() < end, kept()
        time.sleep(0.01)


def test_who_wants_a_websocket_gets_http_and_no_advice_is_logged(connect, caplog):
    caplog.set_level(logging.DEBUG)
    wish = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert answer(connect(), wish)[0] == 200
    assert "ebSocket" not in caplog.text and "pgrade" not in caplog.text


def test_a_process_with_few_descriptors_takes_fewer_connections(monkeypatch):
    resource = pytest.importorskip("resource")
    for descriptors, expected in [(100, 36), (10, 1), (10**6, 512), (resource.RLIM_INFINITY, 512)]:
        limits = (descriptors, resource.RLIM_INFINITY)
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert most_connections() == expected
