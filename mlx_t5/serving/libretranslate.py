"""LibreTranslate's API (https://docs.libretranslate.com): POST /translate and GET /languages.

Programs for subtitles, books and browsers speak it. Their requests come as JSON, as a form or as
query parameters, and a key may be in the body. Each text is decoded sentence by sentence, and
`alternatives` adds further translations without changing the first. Errors are {"error": "…"}, see
`ApiError.response_for`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_t5.engine.document_results import DocumentInFlight
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.engine.rows import Result
from mlx_t5.errors import UserError
from mlx_t5.serving.api_error import ApiError, error_of_validation
from mlx_t5.serving.limits import MAX_BEAMS, MAX_LANGUAGE
from mlx_t5.serving.openai import StrictRoute, has_key
from mlx_t5.serving.queue import GenerationJob
from mlx_t5.serving.service import MAX_PIECES, Service
from mlx_t5.settings import AUTO
from mlx_t5.text.prompts import DocumentOptions, Prompt

UNDETERMINED = "und"  # BCP 47
OWN_CODES = {"zt": "zh-Hant", "pb": "pt-BR"}  # LibreTranslate's, by those of BCP 47
FORM, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
MAX_FIELDS = MAX_PIECES + 20  # of a form: its texts, and the other fields
_NAME = re.compile(rb'\bname="?([^";\r\n]*)')
Others = Mapping[Any, Sequence[str]]  # further texts of each prompt, the best first

router = APIRouter(route_class=StrictRoute, tags=["LibreTranslate"])


class TranslateRequest(BaseModel):
    """The body of POST /translate; fields that LibreTranslate does not have are ignored."""

    model_config = ConfigDict(strict=True)
    q: str | Annotated[list[str], Field(max_length=MAX_PIECES, fail_fast=True)]
    source: str = Field(AUTO, max_length=MAX_LANGUAGE, description="auto: the model's only source")
    target: str = Field(max_length=MAX_LANGUAGE)
    format: Literal["text", ""] | None = None
    alternatives: int | None = Field(None, ge=0, lt=MAX_BEAMS, strict=False)
    api_key: str | None = None


class Translation(BaseModel):
    """The response to POST /translate; lists if `q` is a list."""

    translatedText: str | list[str]
    alternatives: list[Any] = []
    detectedLanguage: Any = None


class SimpleError(BaseModel):
    """The body of every error."""

    error: str


class Language(BaseModel):
    """A language, and those into which it is translated; none if it is only a target."""

    code: str
    name: str
    targets: list[str]


async def _values(request: Request) -> dict[str, Any]:
    """The fields of a request, from its query parameters and its body."""
    raw, content_type = await request.body(), request.headers.get("content-type", "")
    is_form = content_type.split(";")[0].strip().lower() in (FORM, MULTIPART)
    try:
        form = raw if is_form else b""
        query = request.scope["query_string"].decode()
        values = await asyncio.to_thread(_fields, query, form, content_type)
        body = await request.json() if raw and not is_form else {}
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the form is not valid UTF-8") from None
    except ValueError:
        raise ApiError(400, f"the form has over {MAX_FIELDS} fields; send fewer") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be an object")
    return values | body


def _fields(query: str, form: bytes, content_type: str) -> dict[str, Any]:
    """The fields of a query and a form; several of one name are a list. Files are left out."""
    fields = parse_qs(query, True, max_num_fields=MAX_FIELDS)
    boundary = re.search('boundary="?([^";]+)', content_type)
    if boundary:
        delimiter = b"\r\n--" + boundary[1].encode()
        if form.count(delimiter) > MAX_FIELDS:
            raise ValueError("too many fields")
        for part in (b"\r\n" + form).split(delimiter)[1:]:
            head, _, value = part.partition(b"\r\n\r\n")
            name = _NAME.search(head)
            if name and b"filename" not in head:
                fields.setdefault(name[1].decode(), []).append(value.decode())
    else:
        fields |= parse_qs(form.decode(), True, errors="strict", max_num_fields=MAX_FIELDS)
    # Browsers send line breaks in forms as MIME's, not as the user typed them.
    fields = {name: [one.replace("\r\n", "\n") for one in fields[name]] for name in fields}
    return {name: one[0] if len(one) == 1 else one for name, one in fields.items()}


SCHEMA = {"schema": TranslateRequest.model_json_schema()}
CONTENT = {"application/json": SCHEMA, FORM: SCHEMA, MULTIPART: SCHEMA}
DESCRIBED = {"requestBody": {"required": True, "content": CONTENT}}
ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 403, 413, 415, 429, "4XX", 500, 503), {"model": SimpleError}
)


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
    target, source = (OWN_CODES.get(code.lower(), code) for code in (body.target, body.source))
    service: Service = request.app.state.service
    service.require_decoder()
    try:
        prefix, code = service.translations.prefix(target, "" if source == AUTO else source)
    except UserError as error:
        raise ApiError(400, str(error).replace("_language", "")) from None
    service.log_texts("prompts", texts)
    options = DocumentOptions("sentences", prefix, code)
    documents = await service.documents(texts, options, "q")
    prompts = [prompt for document in documents for prompt in document.prompts]
    answers = [best for (best,) in await _decoded(service, prompts, request.receive)]
    # A beam search for each sentence that differs finds the further translations. The first one
    # stays that of greedy decoding, so it does not depend on `alternatives`.
    others: dict[Any, Sequence[str]] = {}
    count = body.alternatives or 0
    if count and not service.exact:  # exact decoding has no beams
        different = list({prompt.source: prompt for prompt in prompts}.values())
        searches = await _decoded(service, different, request.receive, count + 1)
        for prompt, results in zip(different, searches, strict=True):
            others[prompt.source] = [result.text for result in results if result.text]
    result = await asyncio.to_thread(_joined, documents, answers, others, count)
    if body.source == AUTO:
        detected = {"confidence": 0, "language": code or UNDETERMINED}
        result["detectedLanguage"] = [detected] * len(texts)
    if isinstance(body.q, str):
        result = {name: value[0] for name, value in result.items()}
    return JSONResponse(result)


async def _decoded(
    service: Service, prompts: Sequence[Prompt], receive: Any, beams: int = 1
) -> list[list[Result]]:
    """The best `beams` texts of each prompt."""
    beam_settings = {"num_beams": beams, "num_return_sequences": beams}
    settings = service.settings(beam_settings, translates=True)
    request, texts = GenerationRequest(settings), len(prompts) * beams
    job = GenerationJob(texts=texts, request=request, prompts=prompts, of_pieces=True)
    job.sources = [str(prompt.source) for prompt in prompts]
    results = await service.results(job, receive)
    return [results[i : i + beams] for i in range(0, texts, beams)]


def _joined(
    documents: Sequence[DocumentInFlight], answers: Iterable[Result], others: Others, count: int
) -> dict[str, list[Any]]:
    """The translations of all texts, with `count` alternatives, as fields of the response."""
    answers = iter(answers)
    for document in documents:
        for _ in document.prompts:
            document.add(next(answers))
        if document.result.error:
            raise ApiError(500, document.result.error)
    fields: dict[str, list[Any]] = {"translatedText": [d.result.text or "" for d in documents]}
    if count:
        fields["alternatives"] = [_alternatives(d, others, count) for d in documents]
    return fields


def _alternatives(document: DocumentInFlight, others: Others, count: int) -> list[str]:
    """Up to `count` further translations: the n-th has the n-th other text of each sentence."""
    source: Any = document.document
    best = [piece.text for piece in document.result.pieces]
    rows: list[list[str]] = []  # the other texts of each sentence
    for piece, prompt, text in zip(source.pieces, document.prompts, best, strict=True):
        found = others.get(prompt.source, ())
        usable = [one for one in found if not source.loses_address(piece, one)]
        fitting = [source.answered(piece, one) for one in usable]
        rows.append([one for one in fitting if one != text])
    texts: dict[str, None] = {}  # an ordered set
    for n in range(count):
        # A sentence without an n-th other text keeps its best one.
        pieces = [row[n] if n < len(row) else text for row, text in zip(rows, best, strict=True)]
        parts = [source.part(i, pieces) for i in range(len(pieces))]
        texts["".join([*parts, source.before(len(pieces))])] = None
    return [text for text in texts if text != document.result.text]


@router.get("/languages", responses={status: ERRORS[status] for status in (400, 403, "4XX")})
def languages(request: Request) -> list[Language]:  # in a thread: MADLAD-400 has 200,000 pairs
    """Returns all languages of the model, with the targets of each."""
    service: Service = request.app.state.service
    service.require_decoder()
    pairs = service.translations.pairs()
    return [Language(code=code, name=name, targets=targets) for code, name, targets in pairs]
