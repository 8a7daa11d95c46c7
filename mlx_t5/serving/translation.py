"""LibreTranslate's API (https://docs.libretranslate.com): POST /translate and GET /languages.

Programs for subtitles, books and browsers speak it. Their requests come as JSON, as a form or as
query parameters, and a key may be in the body. Each text is decoded sentence by sentence. Errors
are {"error": "…"}, see `ApiError.response_for`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_t5.engine.codec import Job
from mlx_t5.errors import UserError
from mlx_t5.serving.answers import EventStream
from mlx_t5.serving.api import MAX_BEAMS
from mlx_t5.serving.api_error import ApiError, error_of_validation
from mlx_t5.serving.jobs import GenerationJob
from mlx_t5.serving.routes import StrictRoute, has_key
from mlx_t5.settings import AUTO
from mlx_t5.text.documents import Cutting

if TYPE_CHECKING:
    from mlx_t5.serving.service import Service

UNDETERMINED = "und"  # BCP 47
FORM = "application/x-www-form-urlencoded"

router = APIRouter(route_class=StrictRoute, tags=["LibreTranslate"])


class TranslateRequest(BaseModel):
    """The body of POST /translate; fields that LibreTranslate does not have are ignored."""

    model_config = ConfigDict(strict=True)
    q: str | list[str] = Field(description="one text or several")
    source: str = Field(AUTO, description="a language's code; auto: the model's only source")
    target: str
    format: Literal["text"] = "text"
    alternatives: int = Field(0, ge=0, lt=MAX_BEAMS, description="further translations, by beams")
    api_key: str | None = None


class Translation(BaseModel):
    """The answer to POST /translate; lists if `q` is a list."""

    translatedText: str | list[str]
    alternatives: list[Any] = []
    detectedLanguage: Any = None


class SimpleError(BaseModel):
    """The body of every error."""

    error: str


class Language(BaseModel):
    """A language that can be the source, and its targets."""

    code: str
    name: str
    targets: list[str]


async def _values(request: Request) -> dict[str, Any]:
    """The fields of a request, from its query parameters and its body."""
    query, raw = request.url.query, await request.body()
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        form = raw.decode() if kind == FORM else ""
        fields = {**parse_qs(query, True), **parse_qs(form, True, errors="strict")}
        values: dict[str, Any] = {n: v[0] if len(v) == 1 else v for n, v in fields.items()}
        if str(values.get("alternatives")).isdecimal():
            values["alternatives"] = int(values["alternatives"])
        body = await request.json() if raw and kind != FORM else {}
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except ValueError:
        raise ApiError(400, "the form is not valid UTF-8") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be an object")
    return values | body


SCHEMA = {"schema": TranslateRequest.model_json_schema()}
CONTENT = {"application/json": SCHEMA, FORM: SCHEMA}
DESCRIBED = {"requestBody": {"required": True, "content": CONTENT}}
STATUSES: tuple[int | str, ...] = (400, 403, 413, 415, 429, "4XX", 500, 503)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": SimpleError} for status in STATUSES}


@router.post("/translate", response_model=Translation, responses=ERRORS, openapi_extra=DESCRIBED)
async def translate(request: Request) -> Response:
    """Translates one text or several."""
    values = await _values(request)
    if not await has_key(request, values.get("api_key")):
        raise ApiError(403, "wrong or missing API key; send it as api_key")
    try:
        body = TranslateRequest.model_validate(values)
    except ValidationError as error:
        errors: Any = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise error_of_validation(errors, values) from None
    texts = [body.q] if isinstance(body.q, str) else body.q
    if not any(text.strip() for text in texts):
        raise ApiError(400, "q is empty; give a text to translate", "q")
    source = "" if body.source == AUTO else body.source
    service: Service = request.app.state.service
    try:
        prefix, code = service.translations.prefix(body.target, source)
    except UserError as error:
        raise ApiError(400, str(error).replace("_language", "")) from None
    service.log_prompts(texts)
    if body.alternatives:
        answers = await _whole(service, texts, prefix, body.alternatives + 1, request.receive)
    else:
        answers = await _by_sentence(service, texts, prefix, code, request.receive)
    result: dict[str, Any] = {"translatedText": [first for first, *_ in answers]}
    if body.alternatives:
        result["alternatives"] = [others for _, *others in answers]
    if body.source == AUTO:
        detected = {"confidence": 0, "language": code or UNDETERMINED}
        result["detectedLanguage"] = [detected] * len(texts)
    if isinstance(body.q, str):
        result = {name: value[0] for name, value in result.items()}
    return JSONResponse(result)


async def _by_sentence(
    service: Service, texts: Sequence[str], prefix: str, source: str, receive: Any
) -> list[list[str]]:
    documents = await service.documents(texts, Cutting("sentences", prefix, source), "q")
    prompts = [prompt for document in documents for prompt in document.prompts]
    size = min(len(prompts), service.worker.max_batch, service.limits.rows)
    spec = Job(service.settings())
    job = GenerationJob(size=size, texts=len(prompts), spec=spec, prompts=prompts, pieces=True)
    job.sources = prompts
    results = await service.results(EventStream(job, service.worker.jobs, receive))

    def joined() -> list[list[str]]:
        answers = iter(results)
        for document in documents:
            for _ in document.prompts:
                document.add(next(answers))
            document.finish()
        return [[document.result.text or ""] for document in documents]

    answers = await asyncio.to_thread(joined)
    if error := next((d.result.error for d in documents if d.result.error), None):
        raise ApiError(500, error)
    return answers


async def _whole(
    service: Service, texts: Sequence[str], prefix: str, count: int, receive: Any
) -> list[list[str]]:
    """Searches `count` translations of each text, which is not cut."""
    spec = Job(service.settings({"num_beams": count, "num_return_sequences": count}))
    prompts, number = await service.token_ids(texts, "q", prefix), len(texts) * count
    service.require_rows(number, "q")
    job = GenerationJob(size=number, texts=number, spec=spec, prompts=prompts)
    job.sources = [prefix + text for text in texts]
    results = await service.results(EventStream(job, service.worker.jobs, receive))
    answers = [result.text or "" for result in results]
    return [answers[i : i + count] for i in range(0, number, count)]


@router.get("/languages", responses={status: ERRORS[status] for status in (403, "4XX")})
async def languages(request: Request) -> list[Language]:
    """Returns the languages that the model translates, with the targets of each."""
    pairs = request.app.state.service.translations.pairs()
    return [Language(code=code, name=name, targets=targets) for code, name, targets in pairs]
