"""The endpoints that need the key, each from its request to its response.

Completions, chats and embeddings have the format of OpenAI's API, ranks that of Cohere's, Jina's
and Infinity's APIs.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import gc
import hmac
import json
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic import BaseModel
from pydantic_core import from_json

from mlx_t5.engine.rows import Chunk, Result
from mlx_t5.scoring.pairs import Pair, ranking
from mlx_t5.serving import builders, requests, responses
from mlx_t5.serving.api_error import ApiError, failure_of
from mlx_t5.serving.builders import DocumentChunk
from mlx_t5.serving.queue import GenerationJob, ScoringJob, events, last_chunks
from mlx_t5.serving.service import Service

Builder = builders.CompletionBuilder
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS = {"text/event-stream": {"schema": {**EVENT, "description": "a chunk as JSON, or [DONE]"}}}


class StrictRequest(Request):
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

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


router = APIRouter(route_class=StrictRoute)
post_openai = partial(router.post, response_model=None, tags=["OpenAI"])


bearer = HTTPBearer(auto_error=False, scheme_name="key")


async def has_key(request: Request, key: Any = None) -> bool:
    """Whether the server needs no key, or this is its key, or the bearer token is."""
    expected, given = request.app.state.api_key, await bearer(request)
    if expected is None:
        return True
    texts = [text for text in (key, given and given.credentials) if isinstance(text, str)]
    return any(hmac.compare_digest(text.strip().encode(), expected.encode()) for text in texts)


def _service(request: Request, model: str | None = None) -> Service:
    """The service, which must serve the model if a request names one."""
    service: Service = request.app.state.service
    if model not in (None, service.model):
        message = f"there is no such model here; the one that is served is {service.model}"
        raise ApiError(404, message, "model", "model_not_found")
    return service


@post_openai("/v1/completions", responses={200: {"model": responses.Completion, "content": EVENTS}})
async def completions(body: requests.CompletionRequest, request: Request) -> Response:
    """Returns the text that T5 generates for each prompt, whole or as a stream of events."""
    return await _openai(body, request, builders.CompletionBuilder)


@post_openai(
    "/v1/chat/completions", responses={200: {"model": responses.ChatCompletion, "content": EVENTS}}
)
async def chat(body: requests.ChatRequest, request: Request) -> Response:
    """Returns the answer to one user message; a system message is put before that message."""
    return await _openai(body, request, builders.ChatBuilder)


@router.post("/predict", tags=["simple"])
async def predict(body: requests.PredictRequest, request: Request) -> responses.Prediction:
    """Returns the text that T5 generates for a prompt."""
    service = _service(request)
    (result,) = await service.results(await service.generation_job(body), request.receive)
    return responses.Prediction(**vars(result))


async def _openai(
    body: requests.TextRequest, request: Request, builder_type: type[Builder]
) -> Response:
    service = _service(request, body.model)
    builder = builder_type(body, service.model, service.token_decoder.decode)
    job = await service.generation_job(body)
    chunks: AsyncGenerator[Chunk, None] = events(job, service.worker.jobs, request.receive)
    if job.document:
        chunks = builders.document_chunks(chunks, job.document, builder.stream, builder.detailed)
    if builder.stream:
        return await _streamed(service, job, chunks, builder)
    last = await last_chunks(chunks)
    results = [chunk.result for chunk in last]
    service.decoded(job, results)

    def render() -> str:
        usage = builders.usage(job, [result.stats for result in results])
        return _json(builder.response([*map(builder.choice, last)], usage=usage))

    # In a thread, since a document has thousands of pieces, and a text thousands of tokens.
    return Response(await asyncio.to_thread(render), media_type="application/json")


async def _streamed(
    service: Service, job: GenerationJob, chunks: AsyncGenerator[Chunk, None], builder: Builder
) -> Response:
    first = await anext(chunks)  # before the status is sent, as it may be an error

    async def server_sent_events() -> AsyncIterator[str]:
        results = list[Result]()
        chunk: Chunk | None = first
        try:
            async with aclosing(chunks):
                while chunk:
                    if chunk.result:
                        results.append(chunk.result)
                    is_new = chunk.text or chunk.result or isinstance(chunk, DocumentChunk)
                    if is_new or builder.logprobs or builder.detailed:
                        yield _event(builder.response([builder.choice(chunk)]))
                        # In a turn of its own, asyncio closes the connection of a client that
                        # has left; it warns of what is written before that.
                        await asyncio.sleep(0)
                    chunk = await anext(chunks, None)
            if builder.usage_at_end:
                usage = builders.usage(job, [result.stats for result in results])
                yield _event(builder.response([], usage=usage))
            service.decoded(job, results)
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield _event(failure_of(error).body)

    unbuffered = {"X-Accel-Buffering": "no"}
    return StreamingResponse(
        server_sent_events(), media_type="text/event-stream", headers=unbuffered
    )


def _json(body: BaseModel) -> str:
    return body.model_dump_json(exclude_unset=True)


def _event(body: BaseModel) -> str:
    return f"data: {_json(body)}\n\n"


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> responses.ModelList:
    """Returns a list with the one model that is served, its limits and its defaults."""
    return responses.ModelList(object="list", data=[_service(request).describe()])


@router.get("/v1/models/{model}", tags=["OpenAI"])
async def model(model: str, request: Request) -> responses.ServedModel:
    """Returns the model of this name, with its limits and defaults."""
    return _service(request, model).describe()


@router.get("/metrics", response_class=Response, tags=["operation"])
async def prometheus(request: Request) -> Response:
    """Returns the counters in Prometheus' text format."""
    counters = generate_latest(request.app.state.metrics.registry)
    return Response(counters, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@post_openai("/v1/embeddings", responses={200: {"model": responses.EmbeddingList}})
async def embeddings(body: requests.EmbeddingRequest, request: Request) -> Response:
    """Returns a vector for each input: usually the mean of the encoder's outputs for the tokens."""
    service = _service(request, body.model)
    prefix = service.task(body.task, body.inputs).prefix
    ids = await service.token_ids(body.inputs, "input", prefix)
    usage = _usage(ids)
    job = ScoringJob(
        kind="embed",
        prompt_tokens=usage.prompt_tokens,
        ids=ids,
        normalize=bool(body.normalize),
    )
    vectors = await service.score_or_embed(job, request.receive)

    def render() -> Response:
        entries = []
        for i, vector in enumerate(vectors):
            numbers: Any = np.asarray(vector, "<f4")
            if body.encoding_format == "base64":
                embedding: Any = base64.b64encode(numbers).decode()
            else:
                embedding = numbers.tolist()
            entries.append({"object": "embedding", "index": i, "embedding": embedding})
        fields = {"object": "list", "data": entries, "model": service.model}
        return JSONResponse({**fields, "usage": usage.model_dump()})

    return await asyncio.to_thread(render)  # writing millions of numbers takes a while


@router.post(
    "/v1/score",
    response_model=None,
    responses={200: {"model": responses.ScoreList}},
    tags=["scores"],
)
async def score(body: requests.ScoreRequest, request: Request) -> Response:
    """Returns how likely the model is to answer a prompt with each target, token by token."""
    service = _service(request, body.model)
    prefix = service.task(body.task, [body.prompt]).prefix
    (source,) = await service.token_ids([body.prompt], prefix=prefix)
    targets = await service.token_ids(body.targets, "targets")
    pairs = [Pair(tuple(source), tuple(target)) for target in targets]
    usage = _usage([source], targets)
    job = ScoringJob(kind="score", prompt_tokens=usage.prompt_tokens, pairs=pairs)
    scores = await service.score_or_embed(job, request.receive)

    def render() -> Response:
        data = []
        for i, score in enumerate(scores):
            tokens = [service.token_decoder.decode(token).text for token in score.tokens]
            fields = {"logprob": score.logprob, "token_logprobs": score.token_logprobs}
            data.append(responses.ScoreEntry(index=i, tokens=tokens, **fields))
        body = responses.ScoreList(object="list", data=data, model=service.model, usage=usage)
        return Response(body.model_dump_json(), media_type="application/json")

    return await asyncio.to_thread(render)  # a request may have 300,000 tokens


@router.post("/rerank", response_model_exclude_none=True, tags=["scores"])
@router.post("/v2/rerank", response_model_exclude_none=True, tags=["scores"])
@router.post("/v1/rerank", response_model_exclude_none=True, tags=["scores"])
async def rerank(body: requests.RerankRequest, request: Request) -> responses.RankList:
    """Ranks documents by their relevance to a query; needs a model trained like monoT5."""
    service = _service(request, body.model)
    words = body.words or service.rerank_words
    pairs = await service.pairs_to_rank(body.query, body.texts, words, body.max_tokens_per_doc)
    usage = _usage([pair.source for pair in pairs[::2]])
    job = ScoringJob(kind="rerank", prompt_tokens=usage.prompt_tokens, pairs=pairs)
    scores = await service.score_or_embed(job, request.receive)
    entries = []
    for ranked in ranking(scores, body.top_n):
        entry = responses.RankEntry(index=ranked.index, relevance_score=math.exp(ranked.score))
        if body.return_documents:
            text, infinity = body.texts[ranked.index], request.scope["route"].path == "/rerank"
            entry.document = text if infinity else responses.RankedDocument(text=text)
        entries.append(entry)
    fields: Any = {"id": f"rerank-{uuid.uuid4().hex}", "model": service.model, "words": words}
    return responses.RankList(results=entries, usage=usage, **fields)


def _usage(prompts: Sequence[Any], targets: Sequence[Any] = ()) -> responses.ScoringUsage:
    count = sum(map(len, prompts))
    return responses.ScoringUsage(prompt_tokens=count, total_tokens=count + sum(map(len, targets)))
