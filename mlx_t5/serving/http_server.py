"""Serves HTTP: opens the socket, limits connections, checks requests, and reads JSON strictly.

The application refuses requests for which the queue has no room (429). But a connection uses a file
descriptor even before its first request, and without free descriptors the server cannot accept
further connections. So the number of connections is limited as well.
"""

from __future__ import annotations

import asyncio
import codecs
import gc
import hmac
import json
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import anyio
import fastapi
import h11
import uvicorn
from fastapi.routing import APIRoute
from pydantic_core import from_json
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_t5.cli.arguments import INTERRUPTED
from mlx_t5.errors import UserError
from mlx_t5.serving.api_error import STOPPING_MESSAGE, ApiError, internal_error, raised_at
from mlx_t5.serving.metrics import Metrics

log = logging.getLogger(__name__)

# These need no key: without a key they tell clients nothing that is not in the source code.
PUBLIC_PATHS = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
PUBLIC_FOLDERS = ("/page/", "/docs-assets/")
HAS_KEY = "has_key"  # in a request's scope: whether it has the key, or no key is needed
MAX_BODY = 1 << 20  # bytes; while a body is parsed, no other client is served
BODY_SECONDS = 30  # time limit for receiving a body
SEND_SECONDS = 60  # time limit for a client to read a sent part of a response
HEADERS = [("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer")]
# By default --max-batch and --max-queue admit fewer requests, so this number needs no option. The
# limit is lower if the system lets the process open few files (often 1024 on Linux, 256 on macOS).
MAX_CONNECTIONS = 512
OTHER_DESCRIPTORS = 64  # reserved for files and sockets that are not connections
HEAD_SECONDS = 30  # time limit for request headers; up to 60 s for later requests of a connection
LAST_SECONDS = 5  # seconds for clients to read that their requests were given up


class Middleware:
    """The outermost ASGI application, which checks and counts every request.

    It checks the host name, the key and the size of the body, and limits the time to receive the
    body and to send a part of a response. Parts are not buffered, so that streams are not delayed.
    """

    def __init__(
        self,
        app: Callable,
        api_key: str | None,
        metrics: Metrics,
        paths: set[str],
        is_own_name: Callable[[str], bool] | None = None,
    ):
        """Wraps an application.

        Args:
            app: the application to wrap.
            api_key: the key that clients must send; None if no key is needed.
            metrics: the counters of requests.
            paths: paths that are counted by name; any other path counts as "other".
            is_own_name: returns whether a host name belongs to the server; None to accept all.
        """
        self._app, self._key = app, api_key
        self._metrics, self._paths, self._is_own_name = metrics, paths, is_own_name

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Handles a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, refusal, headers = 0, None, dict(scope["headers"])
        path = scope["path"] if scope["path"] in self._paths else "other"
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the HTTP server sends headers without the body
        began = time.monotonic()

        async def respond(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            # Without a limit, unread data would be kept as long as the client stays connected.
            with anyio.fail_after(SEND_SECONDS):
                await send(message)

        try:
            self._check_name(headers)
            scope = {**scope, HAS_KEY: self._check_key(scope["path"], headers)}
            body = await self._body(receive)
            await self._app(scope, _replay(body, receive), respond)
        except ApiError as error:
            refusal = error
        except asyncio.CancelledError:  # the server is shutting down and stops waiting
            refusal = ApiError(503, STOPPING_MESSAGE)
        except Exception as error:  # no traceback: it may show what a client sent
            log.error("%s %s failed: %s", scope["method"], path, raised_at(error))
            refusal = internal_error()
        try:
            if refusal and not status:  # with a status, a response has begun
                await refusal.response(scope, receive, respond)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.request_seconds.labels(path).observe(time.monotonic() - began)

    def _check_name(self, headers: dict[bytes, bytes]) -> None:
        """Refuses requests whose host name is not a name of this server.

        Without this check, a web page whose host name resolves to this server could read answers
        (DNS rebinding).
        """
        if self._is_own_name is None or b"host" not in headers:
            return
        try:
            name = urlsplit("//" + headers[b"host"].decode("latin-1")).hostname
        except ValueError:
            name = None
        if not self._is_own_name(name or ""):
            message = "only localhost may be asked without a key; see the server's --no-auth"
            raise ApiError(403, message, code="unknown_host")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> bool:
        """Returns whether a client has the key; True if no key is needed.

        Raises `ApiError` if the client lacks the key and the path is not public.
        """
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        known = self._key is None or (
            scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key.encode())
        )
        if not (known or path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDERS)):
            message = "wrong or missing API key; send it as Authorization: Bearer KEY"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        return known

    async def _body(self, receive: Callable) -> bytes:
        """Returns a request's whole body; raises `ApiError` if the body is too large or slow."""
        body, close, more = bytearray(), {"Connection": "close"}, True
        try:
            with anyio.fail_after(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client went away")  # this error is never read
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY:
                        reason = f"the body is larger than {MAX_BODY} bytes; send less at a time"
                        raise ApiError(413, reason, headers=close)
                    more = message.get("more_body", False)
        except TimeoutError:
            reason = f"the body did not arrive within {BODY_SECONDS} s"
            raise ApiError(408, reason, headers=close) from None
        return bytes(body)


def _replay(body: bytes, receive: Callable) -> Callable:
    """Returns an ASGI `receive` that first returns the body, and then the connection's messages."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> dict[str, Any]:
        return messages.pop() if messages else await receive()

    return next_message


class StrictRequest(fastapi.Request):
    """A request that reads its JSON strictly.

    Python's own parser also accepts NaN, encodings other than UTF-8, and unpaired surrogates. A
    surrogate is not a character, and code that handles a text with surrogates would fail.
    """

    async def json(self) -> Any:
        """Returns the value of the body; raises `JSONDecodeError` if the body is not valid."""
        body = (await self.body()).removeprefix(codecs.BOM_UTF8)
        # A body may have 300,000 lists. The garbage collector would scan them again and again, and
        # the event loop would wait ten times as long.
        gc.disable()
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None
        finally:
            gc.enable()


class StrictRoute(APIRoute):
    """A route whose handler gets a `StrictRequest`."""

    def get_route_handler(self) -> Callable:
        """Returns a handler that calls FastAPI's handler with a `StrictRequest`."""
        handle = super().get_route_handler()

        async def handle_strictly(request: fastapi.Request) -> fastapi.Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


async def too_many(scope: dict, receive: Callable, send: Callable) -> None:
    """Answers every request with 503; connections above the limit get this ASGI application."""
    message = "too many connections; try again later"
    error = ApiError(503, message, headers={"Connection": "close"})
    await error.response(scope, receive, send)


class LimitedConnection(H11Protocol):
    """uvicorn's protocol with a time limit on request headers, and a limit on connections.

    Attributes:
        limit: the maximum number of open connections.
    """

    limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_DESCRIPTORS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer that limits the wait for headers; refuses connections above `limit`."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_late, (True, None))
        if len(self.connections) > self.limit:
            self.app = too_many

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer that limits the wait for request headers."""
        self._timer.cancel()  # otherwise the loop would keep this object until the timer fires
        super().connection_lost(exc)

    def _close_if_late(self, last: tuple[bool, object]) -> None:
        """Closes the connection if it has waited for request headers since the last check.

        Args:
            last: two facts at the last check: whether the connection waited, and its last request.
        """
        waits = self.conn.their_state is h11.IDLE and not self.timeout_keep_alive_task
        now = waits, self.cycle
        if waits and now == last:
            self.transport.close()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_late, now)


def listener(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address.

    Call it before the models are loaded, so that a wrong address is reported early.

    Raises:
        UserError: the address does not exist, or cannot be bound.
    """
    try:
        # With the protocol, asyncio sets TCP_NODELAY; without it, answers take 40 ms more.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        reason = f"cannot listen on {host}:{port} ({error.strerror})"
        raise UserError(f"{reason}; choose another --host or --port") from None
    return bound


class Server(uvicorn.Server):
    """Answers requests until SIGTERM or Ctrl-C; a second Ctrl-C ends the process at once."""

    def __init__(self, application: Callable, shutdown_seconds: int, give_up: Callable[[], None]):
        """Prepares the server.

        Args:
            application: the ASGI application that answers the requests.
            shutdown_seconds: time for running requests to finish after a signal.
            give_up: answers the unfinished requests with an error; called after `shutdown_seconds`.
        """
        config = uvicorn.Config(
            application,
            log_config=None,
            log_level="error",  # any request can cause warnings
            access_log=False,  # it would show query strings
            server_header=False,
            headers=HEADERS,
            http=LimitedConnection,
            ws="none",
            timeout_graceful_shutdown=shutdown_seconds + LAST_SECONDS,
        )
        super().__init__(config)
        self._seconds, self._give_up = shutdown_seconds, give_up

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts down like uvicorn, but sends an error to clients whose requests take too long."""
        late = asyncio.get_running_loop().call_later(self._seconds, self._give_up)
        await super().shutdown(sockets)
        late.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal like uvicorn, but a second Ctrl-C ends the process at once."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(INTERRUPTED)
        super().handle_exit(sig, frame)
