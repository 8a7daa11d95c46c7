"""Builds the web application: OpenAI's endpoints, the web page, /health, /metrics, /docs."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from mlx_t5.engine.rows import Chunk
from mlx_t5.serving import answers, api, schemas, scoring_routes
from mlx_t5.serving.api_error import (
    ApiError,
    ErrorBody,
    error_of_status,
    error_of_validation,
    failure_of,
)
from mlx_t5.serving.jobs import GenerationJob
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.middleware import Middleware, StrictRoute
from mlx_t5.serving.service import Service

PAGE = Path(__file__).parent / "page"
LAST_SECONDS = 5  # for clients to read that their requests were given up
# The page loads nothing from elsewhere and runs only its own script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 413, 415, 429, 500, 503)
}
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS = {"text/event-stream": {"schema": {**EVENT, "description": "a chunk as JSON, or [DONE]"}}}

bearer = HTTPBearer(auto_error=False, scheme_name="key")
Given = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
guarded, public = APIRouter(route_class=StrictRoute), APIRouter()


def create_app(
    service: Service,
    metrics: Metrics,
    api_key: str | None = None,
    hosts: Sequence[str] = ("*",),
    origins: Sequence[str] = (),
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
        origins: origins of web pages that may use the server, beside its own; "*" for all.
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
    needs_key = [Depends(_require_key)] if api_key else []
    for router in (guarded, scoring_routes.router):
        app.include_router(router, responses=ERRORS, dependencies=needs_key)
    app.include_router(public)
    app.mount("/page", StaticFiles(directory=PAGE))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_framework)
    if origins:
        allowed = {
            "allow_methods": ["*"],
            "allow_headers": ["*"],
            "expose_headers": ["Retry-After"],
        }
        app.add_middleware(CORSMiddleware, allow_origins=origins, **allowed)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.add_middleware(Middleware, metrics=metrics, origins=origins, root_path=root_path)
    _remove_validation_errors(app)
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


def _is_key(request: Request, given: Given) -> bool:
    expected = request.app.state.api_key
    return expected is None or bool(
        given and hmac.compare_digest(given.credentials.encode(), expected.encode())
    )


async def _require_key(request: Request, given: Given) -> None:
    if not _is_key(request, given):
        message = "wrong or missing API key; send it as Authorization: Bearer KEY"
        challenge = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=challenge)


async def _refused(request: Request, error: Any) -> Response:
    return error.response


async def _invalid(request: Request, error: Any) -> Response:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        return ApiError(415, "send JSON, with Content-Type: application/json").response
    return error_of_validation(error.errors()).response


async def _of_framework(request: Request, error: Any) -> Response:
    return error_of_status(error.status_code, error.detail, error.headers).response


@guarded.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": schemas.Completion, "content": EVENTS}},
    tags=["OpenAI"],
)
async def completions(body: api.CompletionRequest, request: Request) -> Response:
    """Returns the text that T5 generates for each prompt, whole or as a stream of events."""
    return await _openai(body, request, answers.CompletionBuilder)


@guarded.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": schemas.ChatCompletion, "content": EVENTS}},
    tags=["OpenAI"],
)
async def chat(body: api.ChatRequest, request: Request) -> Response:
    """Returns the answer to one user message; a system message is put before that message."""
    return await _openai(body, request, answers.ChatBuilder)


@guarded.post("/predict", tags=["simple"])
async def predict(body: api.PredictRequest, request: Request) -> schemas.Prediction:
    """Returns the text that T5 generates for a prompt."""
    service: Service = request.app.state.service
    stream = await service.submit(body, request.receive)
    with closing(stream):
        chunk = await stream.next()
    service.log_texts([chunk.result])
    text, reason, stats = chunk.result.text, chunk.result.finish_reason, chunk.result.stats
    return schemas.Prediction(text=text, finish_reason=reason, stats=stats)


async def _openai(
    body: api.TextRequest, request: Request, builder_type: type[answers.CompletionBuilder]
) -> Response:
    service: Service = request.app.state.service
    service.require_model(body.model)
    builder = builder_type(body, service.model, service.spell)
    stream = await service.submit(body, request.receive)
    chunks = _chunks(stream, builder)
    if not builder.stream:
        async with aclosing(chunks):
            last = sorted([chunk async for chunk in chunks], key=lambda chunk: chunk.index)
        results: list[Any] = [chunk.result for chunk in last]
        service.log_texts(results)
        counts = answers.usage(stream.job, [result.stats for result in results])

        def render() -> str:
            return _json(builder.answer([*map(builder.choice, last)], counts))

        # In a thread, since a document has thousands of pieces, and a text thousands of tokens.
        return Response(await asyncio.to_thread(render), media_type="application/json")
    first = await anext(chunks)  # before the status is sent, as it may be an error
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return StreamingResponse(
        _events(service, stream.job, builder, first, chunks, usage),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _chunks(
    stream: answers.EventStream[GenerationJob], builder: answers.CompletionBuilder
) -> AsyncGenerator[Chunk, None]:
    """Yields the chunks of an answer; cancels the job when it is not read to its end."""
    with closing(stream):
        chunks: AsyncIterator[Chunk] = stream.chunks()
        if document := stream.job.document:
            chunks = answers.joined(chunks, document, builder.stream, builder.detailed)
        async for chunk in chunks:
            yield chunk


async def _events(
    service: Service,
    job: GenerationJob,
    builder: answers.CompletionBuilder,
    first: Chunk,
    chunks: AsyncGenerator[Chunk, None],
    usage: bool,
) -> AsyncIterator[str]:
    """Yields an answer's server-sent events; with `usage`, token counts precede "[DONE]"."""
    last: list[Any] = []
    chunk: Chunk | None = first
    try:
        async with aclosing(chunks):
            while chunk:
                if chunk.result:
                    last.append(chunk.result)
                shown = chunk.text or chunk.result or isinstance(chunk, answers.DocumentChunk)
                if shown or builder.logprobs or builder.detailed:
                    yield _event(builder.answer([builder.choice(chunk)], None))
                chunk = await anext(chunks, None)
        if usage:
            counts = answers.usage(job, [result.stats for result in last])
            yield _event(builder.answer([], counts))
        service.log_texts(last)
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(failure_of(error).body)


def _json(body: BaseModel) -> str:
    return body.model_dump_json(exclude_unset=True)


def _event(body: BaseModel) -> str:
    return f"data: {_json(body)}\n\n"


@guarded.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> schemas.ModelList:
    """Returns a list with the one model that is served, its limits and its defaults."""
    return schemas.ModelList(object="list", data=[request.app.state.service.describe()])


@guarded.get("/v1/models/{model}", tags=["OpenAI"])
async def model(model: str, request: Request) -> schemas.ServedModel:
    """Returns the model of this name, with its limits and defaults."""
    request.app.state.service.require_model(model)
    return request.app.state.service.describe()


@guarded.get("/metrics", response_class=Response, tags=["operation"])
async def prometheus(request: Request) -> Response:
    """Returns the counters in Prometheus' text format."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@public.get("/health", responses={503: {"description": "takes no requests"}}, tags=["operation"])
async def health(request: Request) -> Response:
    """Returns the status and, with a valid key, the numbers of running and waiting rows."""
    service: Service = request.app.state.service
    status, reason = service.worker.health()
    body: dict[str, Any] = {"status": status} | ({"reason": reason} if reason else {})
    if _is_key(request, await bearer(request)):
        running, waiting = service.worker.rows
        body |= {"model": service.model, "running": running, "waiting": waiting}
    return JSONResponse(body, 503 if reason else 200)


@public.get("/", include_in_schema=False)
async def page() -> Response:
    return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY})


def _remove_validation_errors(app: FastAPI) -> None:
    """Removes FastAPI's own validation errors from the description, which are never sent."""
    schema = app.openapi()  # FastAPI caches and serves this object
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
