"""Builds the web application: OpenAI's endpoints, the web page, /health, /metrics, /docs."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from mlx_t5.engine.rows import Chunk
from mlx_t5.serving import answers, api, schemas, scoring_routes
from mlx_t5.serving.api_error import (
    ApiError,
    ErrorBody,
    error_of_status,
    error_of_validation,
    failure_of,
    internal_error,
)
from mlx_t5.serving.http_server import HAS_KEY, PUBLIC_PATHS, Middleware, StrictRoute
from mlx_t5.serving.jobs import GenerationJob
from mlx_t5.serving.metrics import Metrics

if TYPE_CHECKING:
    from mlx_t5.serving.service import Service

PAGE = Path(__file__).parent / "page"
LAST_STEPS = 10  # seconds within which the worker has to stop
STATIC = (".css", ".js", ".svg")
# The page loads nothing from elsewhere and runs only its own script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REFUSALS = {
    400: "not a valid request",
    401: "wrong or missing key",
    403: "the request's host name is not a name of this machine",
    404: "no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "the queue is full",
    500: "internal error",
    503: "no memory left, too many connections, shutting down, or decoding has failed",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    s: {"model": ErrorBody, "description": text} for s, text in REFUSALS.items()
}
JSON_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
TURN = ("system", "user")  # roles of a chat's messages; the first may be missing
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS = {"text/event-stream": {"schema": {**EVENT, "description": "a chunk as JSON, or [DONE]"}}}


def create_app(
    service: Service,
    metrics: Metrics,
    api_key: str | None,
    is_own_name: Callable[[str], bool] | None = None,
) -> Middleware:
    """Returns the web application with all its endpoints, wrapped in `Middleware`.

    Args:
        service: checks and submits requests; its worker stops when the application shuts down.
        metrics: the counters that are shown at /metrics.
        api_key: the key that clients must send; None if no key is needed.
        is_own_name: returns whether a host name belongs to this server; None to accept all names.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        # All clients have been served or cut off; remaining rows leave within a step.
        await asyncio.to_thread(service.worker.stop, LAST_STEPS)

    app = FastAPIOffline(
        title="T5 with speculative decoding",
        description="OpenAI's API for a T5 model. Every error has the same shape; a streamed one "
        "is the last event.",
        version="1",
        lifespan=lifespan,
        redoc_url=None,
        static_url="/docs-assets",
    )
    app.router.route_class = StrictRoute
    app.state.service, app.state.metrics = service, metrics
    _add_handlers(app)
    _add_generation(app)
    app.include_router(scoring_routes.router, responses=ERRORS)
    _add_information(app)
    _add_page(app)
    _add_description(app, api_key is not None)
    paths = {*app.openapi()["paths"], *(getattr(route, "path", "") for route in app.routes)}
    return Middleware(app, api_key, metrics, paths, is_own_name)


def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            return ApiError(415, "send JSON, with Content-Type: application/json").response
        return error_of_validation(error.errors()).response

    @app.exception_handler(HTTPException)
    async def of_framework(request: Request, error: HTTPException) -> Response:
        return error_of_status(error.status_code, error.detail, error.headers).response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return internal_error().response


def _add_generation(app: FastAPI) -> None:
    service: Service = app.state.service

    @app.post(
        "/v1/completions",
        response_model=None,
        responses={**ERRORS, 200: {"model": schemas.Completion, "content": EVENTS}},
        tags=["OpenAI"],
    )
    async def completions(body: api.CompletionRequest, request: Request) -> Response:
        """Returns the text that T5 generates for each prompt, whole or as a stream of events."""
        return await _openai(service, body, request, answers.CompletionBuilder)

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses={**ERRORS, 200: {"model": schemas.ChatCompletion, "content": EVENTS}},
        tags=["OpenAI"],
    )
    async def chat(body: api.ChatRequest, request: Request) -> Response:
        """Returns the answer to one user message; a system message is put before that message."""
        return await _openai(service, body, request, answers.ChatBuilder)

    @app.post("/predict", responses=ERRORS, tags=["simple"])
    async def predict(body: api.PredictRequest, request: Request) -> schemas.Prediction:
        """Returns the text that T5 generates for a prompt."""
        stream = await service.submit(body, request.receive)
        (chunk,) = await stream.finished()
        result: Any = chunk.result
        service.log_texts([result])
        return schemas.Prediction(
            text=result.text, finish_reason=result.finish_reason, stats=result.stats
        )


async def _openai(
    service: Service,
    body: api.TextRequest,
    request: Request,
    builder_type: type[answers.CompletionBuilder],
) -> Response:
    service.require_model(body.model)
    builder = builder_type(body, service.model, service.spell)
    stream = await service.submit(body, request.receive)
    if not builder.stream:
        with contextlib.closing(stream):
            chunks = await stream.finished()
        results: list[Any] = [chunk.result for chunk in chunks]
        service.log_texts(results)
        counts = answers.usage(stream.job, [result.stats for result in results])
        answer = builder.answer(list(map(builder.choice, chunks)), counts)
        content = stream.complete(answer.model_dump_json(exclude_unset=True))
        return Response(content, media_type="application/json")
    first = await stream.next()  # before the status is sent, as the event may be an error
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return StreamingResponse(
        _events(service, stream, builder, first, usage),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _events(
    service: Service,
    stream: answers.EventStream[GenerationJob],
    builder: answers.CompletionBuilder,
    first: Chunk,
    usage: bool,
) -> AsyncIterator[str]:
    """Yields an answer's server-sent events; with `usage`, token counts precede "[DONE]"."""
    last: list[Any] = []
    try:
        async for chunk in stream.chunks(first):
            if chunk.result:
                last.append(chunk.result)
            shown = chunk.text or chunk.result or isinstance(chunk, answers.DocumentChunk)
            if shown or builder.logprobs or builder.detailed:
                yield _sse(builder.answer([builder.choice(chunk)], None))
        if usage:
            counts = answers.usage(stream.job, [result.stats for result in last])
            yield _sse(builder.answer([], counts))
        service.log_texts(last)
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _sse(failure_of(error).body)
    finally:
        stream.close()


def _sse(body: Any) -> str:
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


def _add_information(app: FastAPI) -> None:
    service, metrics = app.state.service, app.state.metrics

    @app.get("/v1/models", responses={401: ERRORS[401]}, tags=["OpenAI"])
    async def models() -> schemas.ModelList:
        """Returns a list with the one model that is served, its limits and its defaults."""
        return schemas.ModelList(object="list", data=[service.describe()])

    @app.get("/v1/models/{model}", responses={s: ERRORS[s] for s in (401, 404)}, tags=["OpenAI"])
    async def model(model: str) -> schemas.ServedModel:
        """Returns the model of this name, with its limits and defaults."""
        service.require_model(model)
        return service.describe()

    @app.get("/health", responses={503: {"description": "takes no requests"}}, tags=["operation"])
    async def health(request: Request) -> Response:
        """Returns the status and, with a valid key, the numbers of running and waiting rows."""
        status, reason = service.worker.health()
        body: dict[str, Any] = {"status": status} | ({"reason": reason} if reason else {})
        if request.scope[HAS_KEY]:
            running, waiting = service.worker.rows
            body |= {"model": service.model, "running": running, "waiting": waiting}
        return JSONResponse(body, 503 if reason else 200)

    @app.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={401: {"description": REFUSALS[401], "content": JSON_ERROR}},
        tags=["operation"],
    )
    async def prometheus() -> Response:
        """Returns the counters in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _add_page(app: FastAPI) -> None:
    def add(path: str, file: Path) -> None:
        content = file.read_bytes()
        kind = mimetypes.guess_type(file.name)[0]

        @app.get(path, include_in_schema=False)
        async def asset() -> Response:
            headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
            return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)

    add("/", PAGE / "index.html")
    for file in sorted(PAGE.iterdir()):
        if file.suffix in STATIC:
            add(f"/page/{file.name}", file)


def _add_description(app: FastAPI, with_key: bool) -> None:
    """Corrects the OpenAPI description that FastAPI makes.

    Removes FastAPI's own validation error, adds the API key, and lists the roles of a chat.
    """
    schema = app.openapi()  # FastAPI caches and serves this object
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if with_key and path not in PUBLIC_PATHS:
                operation["security"] = [{"key": []}]
    if with_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["ChatRequest"]["properties"]["messages"] = {"oneOf": [_turn("user"), _turn(*TURN)]}


def _turn(*roles: str) -> dict[str, Any]:
    """Returns the JSON schema of a list of messages that have these roles, in this order."""

    def message(role: str) -> dict[str, Any]:
        fixed = {"properties": {"role": {"const": role}}}
        return {"allOf": [{"$ref": "#/components/schemas/Message"}, fixed]}

    items = list(map(message, roles))
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
