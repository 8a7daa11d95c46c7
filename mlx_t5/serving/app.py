"""Builds the web application: who may use it, its endpoints, the web page, /health and /docs."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi_offline import FastAPIOffline
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from mlx_t5.serving import api_error, libretranslate, openai
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.service import Service

log = logging.getLogger(__name__)

MAX_BODY = 1 << 20  # bytes; while a body is parsed, no other client is served
PAGE = Path(__file__).parent / "page"
LAST_SECONDS = 5  # for clients to read that their requests were given up
# The page loads nothing from elsewhere and runs only its own script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# "4XX" keeps FastAPI from describing its own validation errors, which are never sent. One model is
# enough: FastAPI builds its validator anew for every route and status.
_ERROR = {"schema": {"$ref": "#/components/schemas/ErrorBody"}}
ERRORS: dict[int | str, dict[str, Any]] = {
    **dict.fromkeys(
        (400, 401, 403, 404, 413, 415, 429, 500, 503), {"content": {"application/json": _ERROR}}
    ),
    "4XX": {"model": api_error.ErrorBody},
}

public = APIRouter()


def create_app(
    service: Service,
    metrics: Metrics,
    api_key: str | None = None,
    hosts: Sequence[str] = ("*",),
    allowed_origins: Sequence[str] = (),
    root_path: str = "",
) -> FastAPI:
    """Returns the web application with all its endpoints.

    Set its `state.server` to the `uvicorn.Server` that runs it: after a signal to stop, requests
    that do not finish in time then get an error.

    Args:
        service: checks and submits requests; its worker stops when the application shuts down.
        metrics: the counters that are shown at /metrics.
        api_key: the key that clients must send; None if no key is needed.
        hosts: host names under which clients may ask; "*" for all.
        allowed_origins: origins of web pages that may use the server, beside its own; "*" for all.
        root_path: the path under which a proxy shows the server, such as "/t5".
    """
    app = FastAPIOffline(
        title="T5 with speculative decoding",
        description="OpenAI's API for a T5 model. Every error has the same shape; a streamed one "
        "is the last event.",
        version="1",
        lifespan=_lifespan,
        redoc_url=None,
        static_url="/docs-assets",
    )
    app.state.service, app.state.metrics, app.state.server = service, metrics, None
    app.state.api_key = api_key
    needs_key = [Depends(openai.bearer), Depends(_require_key)] if api_key else []
    app.include_router(openai.router, responses=ERRORS, dependencies=needs_key)
    app.include_router(libretranslate.router)
    app.include_router(public)
    app.mount("/page", StaticFiles(directory=PAGE))
    for kind in (ApiError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    if allowed_origins:
        allowed = {"allow_origins": allowed_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, expose_headers=["Retry-After"], **allowed)
    app.add_middleware(Middleware, metrics, hosts, allowed_origins, root_path)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    giving_up = asyncio.create_task(_give_up_late(app))
    try:
        yield
    except asyncio.CancelledError:  # a second Ctrl-C waits for nothing
        return
    giving_up.cancel()
    # All clients have been served or cut off; remaining rows leave within a step.
    await asyncio.to_thread(app.state.service.worker.stop, 2 * LAST_SECONDS)


async def _give_up_late(app: FastAPI) -> None:
    """Sends an error to unfinished requests just before uvicorn would cut them off."""
    while not (app.state.server and app.state.server.should_exit):
        await asyncio.sleep(0.1)
    await asyncio.sleep(app.state.server.config.timeout_graceful_shutdown - LAST_SECONDS)
    app.state.service.worker.give_up()


async def _require_key(request: Request) -> None:
    if not await openai.has_key(request):
        message = "wrong or missing API key; send it as Authorization: Bearer KEY"
        challenge = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=challenge)


async def _answer_error(request: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):
        message = {
            404: "there is nothing at this address; see /docs",
            405: "this address does not take this method; see /docs",
        }.get(error.status_code, error.detail)
        error = ApiError(error.status_code, message, headers=error.headers)
    elif isinstance(error, RequestValidationError):
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind == "application/json" or kind.endswith("+json"):
            error = api_error.error_of_validation(error.errors(), error.body)
        else:
            error = ApiError(415, "send JSON, with Content-Type: application/json")
    return error.response_for(request.scope)


class Middleware:
    """ASGI middleware: Host and Origin, the body's size, the proxy's path, metrics, and HEAD."""

    def __init__(
        self,
        app: Any,
        metrics: Metrics,
        hosts: Sequence[str],
        allowed_origins: Sequence[str],
        root: str,
    ):
        """See `create_app` for the arguments."""
        self._app, self._metrics, self._root = app, metrics, root
        self._hosts, self._allowed_origins = hosts, allowed_origins

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, root = scope["path"], self._root
        refusal = self._refusal(Headers(scope=scope))
        try:
            if not path.startswith("/"):  # a whole URL, as for a proxy
                path = urlsplit(path).path or "/"
        except ValueError:
            path, refusal = "/", ApiError(400, "the request's target is not a valid URL")
            log.warning("a request was refused: its target is not a valid URL")
        if path != root and not path.startswith(f"{root}/"):
            path = root + path  # the proxy has stripped it
        # The HTTP server sends the response to HEAD without its body.
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

        try:
            if not refusal:
                await self._app(scope, limited, respond)
        except asyncio.CancelledError:  # the server is shutting down and stops waiting
            refusal = ApiError(503, api_error.STOPPING_MESSAGE)
        except Exception as error:  # no traceback: it may show what a client sent
            log.error("%s %s failed: %s", method, _label(scope), api_error.raised_at(error))
            refusal = api_error.internal_error()
        try:
            if refusal and not status:  # with a status, a response has begun
                await refusal.response_for(scope)(scope, receive, respond)
        finally:
            label = _label(scope)
            self._metrics.requests.labels(label, str(status)).inc()
            self._metrics.request_seconds.labels(label).observe(time.monotonic() - began)

    def _refusal(self, headers: Headers) -> ApiError | None:
        """Refuses other host names, compressed bodies, and web pages of other origins.

        Only browsers send an origin.
        """
        host = headers.get("host", "").lower()
        if "*" not in self._hosts and re.sub(r":\d*$", "", host) not in self._hosts:
            message = "this host name may not be used here; use localhost, or see --no-auth"
            return ApiError(400, message, code="unknown_host")
        if headers.get("content-encoding", "identity").lower() != "identity":
            return ApiError(415, "the body is compressed; send it without Content-Encoding")
        origin = headers.get("origin")
        own = (origin or "").partition("://")[2].lower() == host
        if origin is None or own or origin in self._allowed_origins or "*" in self._allowed_origins:
            return None
        message = "web pages of this origin may not use the server; see its option --allow-origin"
        return ApiError(403, message, code="unknown_origin")


def _label(scope: dict) -> str:
    """The path of the route that handled a request; "other" if there is none."""
    return getattr(scope.get("route"), "path", "other")


@public.get("/health", responses={503: {"description": "takes no requests"}}, tags=["operation"])
async def health(request: Request) -> Response:
    """Returns the status and, with a valid key, the numbers of running and waiting rows."""
    service: Service = request.app.state.service
    status, reason = service.worker.health()
    body: dict[str, Any] = {"status": status} | ({"reason": reason} if reason else {})
    if await openai.has_key(request):
        running, waiting = service.worker.rows
        body |= {"model": service.model, "running": running, "waiting": waiting}
    return JSONResponse(body, 503 if reason else 200)


@public.get("/favicon.ico", include_in_schema=False)
async def icon() -> Response:
    return FileResponse(PAGE / "icon.svg")


@public.get("/", include_in_schema=False)
async def page() -> Response:
    return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY})
