"""Checks and counts every request, and reads its JSON strictly."""

from __future__ import annotations

import asyncio
import codecs
import gc
import json
import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import fastapi
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from mlx_t5.serving.api_error import STOPPING_MESSAGE, ApiError, internal_error, raised_at
from mlx_t5.serving.metrics import Metrics

log = logging.getLogger(__name__)

MAX_BODY = 1 << 20  # bytes; while a body is parsed, no other client is served


class Middleware:
    """ASGI middleware: the Origin, the size of the body, the proxy's path, metrics, and HEAD."""

    def __init__(
        self, app: Callable, metrics: Metrics, origins: Sequence[str] = (), root_path: str = ""
    ):
        """See `create_app` for the arguments."""
        self._app, self._metrics, self._origins, self._root = app, metrics, origins, root_path

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, root = scope["path"], self._root
        if path != root and not path.startswith(f"{root}/"):
            path = root + path  # the proxy has stripped it
        # The HTTP server sends the answer to HEAD without its body.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "path": path, "root_path": root, "method": method}
        status, size, began = 0, 0, time.monotonic()

        async def limited() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                reason = f"the body is larger than {MAX_BODY} bytes; send less at a time"
                raise HTTPException(413, reason, {"Connection": "close"})
            return message

        async def respond(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        try:
            if not refusal:
                await self._app(scope, limited, respond)
        except asyncio.CancelledError:  # the server is shutting down and stops waiting
            refusal = ApiError(503, STOPPING_MESSAGE)
        except Exception as error:  # no traceback: it may show what a client sent
            log.error("%s %s failed: %s", method, _label(scope), raised_at(error))
            refusal = internal_error()
        try:
            if refusal and not status:  # with a status, a response has begun
                await refusal.response(scope, receive, respond)
        finally:
            label = _label(scope)
            self._metrics.requests.labels(label, str(status)).inc()
            self._metrics.request_seconds.labels(label).observe(time.monotonic() - began)

    def _refusal(self, headers: Headers) -> ApiError | None:
        """Refuses web pages of other origins; programs other than browsers send no Origin."""
        origin = headers.get("origin")
        own = (origin or "").partition("://")[2].lower() == headers.get("host", "").lower()
        if origin is None or own or origin in self._origins or "*" in self._origins:
            return None
        message = "web pages of this origin may not use the server; see its option --allow-origin"
        return ApiError(403, message, code="unknown_origin")


def _label(scope: dict) -> str:
    """The path of the route that handled a request; "other" if there is none."""
    return getattr(scope.get("route"), "path", "other")


class StrictRequest(fastapi.Request):
    """A request that reads its JSON strictly.

    Python's own parser also accepts NaN, encodings other than UTF-8, and unpaired surrogates. A
    surrogate is not a character, and code that handles a text with surrogates would fail.
    """

    async def json(self) -> Any:
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
        handle = super().get_route_handler()

        async def handle_strictly(request: fastapi.Request) -> fastapi.Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly
