"""Stands in front of the application: keys, sizes, time limits, counting, and the last resort.

Plain ASGI, so that nothing comes between a streaming response and its client.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from serving.errors import ApiError, place
from serving.metrics import Metrics

log = logging.getLogger(__name__)

# No key is asked for here: nothing of these says more than the source code does.
OPEN = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
OPEN_FOLDERS = ("/page/", "/docs-assets/")
BODY_SECONDS = 30  # in which a body has to arrive
HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Guard:
    """The outermost application."""

    def __init__(
        self,
        app: Callable,
        api_key: str | None,
        max_body: int,
        metrics: Metrics,
        paths: set[str],
    ):
        """Wraps an application.

        Args:
            app: the one behind.
            api_key: that clients have to send; None if none is needed.
            max_body: bytes that a body may have.
            metrics: told of every request.
            paths: addresses that are counted by name; all others count as "other".
        """
        self._app, self._key, self._max_body = app, api_key, max_body
        self._metrics, self._paths = metrics, paths

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(send)
        began = time.monotonic()
        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _replay(body, receive), exchange.send)
        except ApiError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # no traceback: it may show what a client sent
            log.error("%s %s failed: %s", scope["method"], scope["path"], place(error))
            await exchange.refuse(ApiError(500, "internal error; the server's log says where"))
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(exchange.status)).inc()
            self._metrics.request_seconds.labels(path).observe(time.monotonic() - began)

    def _check_key(self, scope: dict) -> None:
        if self._key is None or scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDERS):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key, self._key.encode()):
            message = "wrong or missing API key; send it as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    async def _body(self, scope: dict, receive: Callable) -> bytes:
        """Reads the whole body, which is small, before anything is done with it."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()
        try:
            return await asyncio.wait_for(self._read(receive), BODY_SECONDS)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None

    async def _read(self, receive: Callable) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client went away")
            body += message.get("body", b"")
            if len(body) > self._max_body:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_body} bytes; send less at a time"
        return ApiError(413, message, headers={"Connection": "close"})


class _Exchange:
    """One response: notes its status and adds headers."""

    def __init__(self, send: Callable):
        self._send, self.status = send, 0

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *more]}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        if self.status:  # too late for another status
            return
        body = json.dumps(error.content).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **{name.lower(): value for name, value in error.headers.items()},
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Callable) -> Callable:
    """A `receive` that gives the body once, and then what the connection says."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> dict[str, Any]:
        return left.pop() if left else await receive()

    return next_message
