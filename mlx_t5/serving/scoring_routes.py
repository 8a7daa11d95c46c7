"""The endpoints that need no decoding: /v1/embeddings, /v1/score and /v1/rerank.

Embeddings have the format of OpenAI's API. Ranks have the format of Cohere's and Jina's APIs.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from mlx_t5.scoring.pairs import Pair, ranking
from mlx_t5.serving.api import Request as Body
from mlx_t5.serving.api import Text, TokenIds
from mlx_t5.serving.jobs import ScoringJob
from mlx_t5.serving.middleware import StrictRoute
from mlx_t5.text.prompts import as_list as listed_prompts

if TYPE_CHECKING:
    from mlx_t5.serving.service import Service

MAX_INPUTS = 2048  # per request, as in OpenAI's API
MAX_TARGETS = MAX_DOCUMENTS = 1024
Many = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Model = Annotated[str | None, Field(description="absent: the model that is served")]
Task = Annotated[
    Text | None, Field(description="a task of the model: its prefix is put before the prompt")
]
User = Annotated[str | None, Field(description="accepted and not used")]


class EmbeddingRequest(Body):
    """The body of POST /v1/embeddings."""

    input: Text | Annotated[list[Text], Many] | TokenIds | Annotated[list[TokenIds], Many] = Field(
        description="one text or several, or the same as token ids"
    )
    model: Model = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the bytes of float32 numbers, little-endian"
    )
    normalize: bool | None = Field(None, description="true: scale vectors to length 1")
    task: Task = None
    dimensions: None = Field(None, description="not supported: absent")
    user: User = None

    @property
    def inputs(self) -> list[Any]:
        return listed_prompts(self.input)[0]


class ScoreRequest(Body):
    """The body of POST /v1/score."""

    prompt: Text | TokenIds
    targets: Annotated[
        list[Text | TokenIds], Field(min_length=1, max_length=MAX_TARGETS, fail_fast=True)
    ] = Field(description="the end token is added to a text; token ids are scored as they are")
    task: Task = None
    model: Model = None


class RerankRequest(Body):
    """The body of POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1, le=MAX_DOCUMENTS)] | None = None
    return_documents: bool | None = None
    model: Model = None


class ScoringUsage(BaseModel):
    """Token counts of a request, end tokens included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: ScoringUsage


class ScoreEntry(BaseModel):
    """The log-probabilities of one target of the request; `tokens` has the texts of its tokens."""

    index: int
    logprob: float
    tokens: list[str]
    token_logprobs: list[float]


class ScoreList(BaseModel):
    """The answer of /v1/score."""

    object: Literal["list"]
    data: list[ScoreEntry]
    model: str
    usage: ScoringUsage


class RankedDocument(BaseModel):
    """The text of a ranked document."""

    text: str


class RankEntry(BaseModel):
    """A ranked document; `relevance_score` is the probability that it is relevant."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RankList(BaseModel):
    """The answer of /v1/rerank, the most relevant document first."""

    results: list[RankEntry]
    model: str
    usage: ScoringUsage


router = APIRouter(route_class=StrictRoute)


def _service(request: Request, model: str | None) -> Service:
    service: Service = request.app.state.service
    service.require_model(model)
    return service


@router.post(
    "/v1/embeddings",
    response_model=None,
    responses={200: {"model": EmbeddingList}},
    tags=["OpenAI"],
)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Returns a vector for each input: usually the mean of the encoder's outputs for the tokens."""
    service = _service(request, body.model)
    prefix = service.task(body.task, body.inputs).prefix
    ids = await service.token_ids(body.inputs, "input", prefix, service.pooling)
    usage = _usage(ids)
    normalize = bool(body.normalize)
    job = ScoringJob(kind="embed", prompt_tokens=usage.prompt_tokens, ids=ids, normalize=normalize)
    vectors = await service.score_or_embed(job, request.receive)

    def answer() -> Response:
        entries = []
        for i, vector in enumerate(vectors):
            numbers = np.asarray(vector, "<f4")
            coded = base64.b64encode(numbers.tobytes()).decode()
            embedding = coded if body.encoding_format == "base64" else numbers.tolist()
            entries.append({"object": "embedding", "index": i, "embedding": embedding})
        fields = {"object": "list", "data": entries, "model": service.model}
        return JSONResponse({**fields, "usage": usage.model_dump()})

    return await asyncio.to_thread(answer)  # writing millions of numbers takes a while


@router.post(
    "/v1/score", response_model=None, responses={200: {"model": ScoreList}}, tags=["scores"]
)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Returns how likely the model is to answer a prompt with each target, token by token."""
    service = _service(request, body.model)
    prefix = service.task(body.task, [body.prompt]).prefix
    (source,) = await service.token_ids([body.prompt], prefix=prefix)
    targets = await service.token_ids(body.targets, "targets")
    pairs = [Pair(tuple(source), tuple(target)) for target in targets]
    usage = _usage([source], targets)
    job = ScoringJob(kind="score", prompt_tokens=usage.prompt_tokens, pairs=pairs)
    scores = await service.score_or_embed(job, request.receive)

    def answer() -> Response:
        data = []
        for i, score in enumerate(scores):
            tokens = [service.spell(token).text for token in score.tokens]
            fields = {"logprob": score.logprob, "token_logprobs": score.token_logprobs}
            data.append(ScoreEntry(index=i, tokens=tokens, **fields))
        body = ScoreList(object="list", data=data, model=service.model, usage=usage)
        return Response(body.model_dump_json(), media_type="application/json")

    return await asyncio.to_thread(answer)  # a request may have 300,000 tokens


@router.post("/v1/rerank", response_model_exclude_none=True, tags=["scores"])
async def rerank(body: RerankRequest, request: Request) -> RankList:
    """Ranks documents by their relevance to a query; needs a model trained like monoT5."""
    service = _service(request, body.model)
    pairs = await service.pairs_to_rank(body.query, body.documents)
    usage = _usage([pair.source for pair in pairs[::2]])
    job = ScoringJob(kind="rerank", prompt_tokens=usage.prompt_tokens, pairs=pairs)
    scores = await service.score_or_embed(job, request.receive)
    entries = []
    for ranked in ranking(scores, body.top_n):
        entry = RankEntry(index=ranked.index, relevance_score=math.exp(ranked.score))
        if body.return_documents:
            entry.document = RankedDocument(text=body.documents[ranked.index])
        entries.append(entry)
    return RankList(results=entries, model=service.model, usage=usage)


def _usage(prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]] = ()) -> ScoringUsage:
    prompt_tokens = sum(map(len, prompts))
    return ScoringUsage(
        prompt_tokens=prompt_tokens, total_tokens=prompt_tokens + sum(map(len, targets))
    )
