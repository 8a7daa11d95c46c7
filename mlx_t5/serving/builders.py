"""Builds responses from the events of jobs: a whole response, or its chunks (see responses.py)."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from mlx_t5.engine.document_results import DocumentInFlight
from mlx_t5.engine.rows import Chunk, Result, Stats, TokenLogprob
from mlx_t5.serving import responses
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.queue import GenerationJob
from mlx_t5.serving.responses import AnsweredPiece, Usage
from mlx_t5.text.detokenizer import BYTE, byte_speller, decode

Fields = dict[str, Any]

if TYPE_CHECKING:
    from mlx_t5.serving.requests import TextRequest

MIN_LOGPROB = -9999.0  # OpenAI's ChatCompletionTokenLogprob: "the token is very unlikely"


@dataclass
class DocumentChunk(Chunk):
    """Answers to pieces of a document, as a chunk of the document's answer."""

    fields: Fields = field(default_factory=dict)  # `pieces` and `stats` of a choice


async def document_chunks(
    chunks: AsyncGenerator[Chunk, None], document: DocumentInFlight, streamed: bool, detailed: bool
) -> AsyncGenerator[DocumentChunk, None]:
    """Joins the answers to a document's pieces, which come in any order.

    Args:
        chunks: the answers.
        document: the document, without answers.
        streamed: whether to yield a chunk per piece, in order; otherwise one chunk has the whole.
        detailed: whether to report the origin of each token (draft, copy or target).

    Raises:
        ApiError: no piece could be decoded.
    """
    stats, pieces = document.stats, list[AnsweredPiece]()
    if not document.prompts:
        fields: Fields = {"pieces": [], "stats": vars(stats)}
        text = document.result.text or ""
        yield DocumentChunk(text, [], [], [], stats, document.result, fields=fields)
    early = dict[int, Chunk]()  # by index: answers that came before the answers to earlier pieces
    async with aclosing(chunks):
        async for answer in chunks:
            early[answer.index] = answer
            while len(document.result.pieces) in early:
                answer = early.pop(len(document.result.pieces))
                kept = stats.kept
                one = cast(Result, answer.result)
                added = document.add(one)
                if added.result and added.result.error:
                    raise ApiError(500, added.result.error)
                piece = vars(document.result.pieces[-1])
                fields = {name: value for name, value in piece.items() if value is not None}
                # Else the tokens are not in the document, or there is text between them.
                if detailed and stats.kept == kept and not one.pieces:
                    fields["speculation"] = speculation(answer)
                pieces.append(AnsweredPiece(**fields))
                if streamed or document.complete:
                    counts = vars(stats) | {"pieces": len(document.prompts)}
                    fields = {"pieces": pieces, "stats": counts}
                    yield DocumentChunk(**vars(added), fields=fields)
                    pieces = []


@dataclass(frozen=True)
class DecodedToken:
    r"""A single token as text, for log-probabilities.

    Bytes that are no whole character are escaped in `text`, as in OpenAI's API (`\xe4`).
    """

    text: str  # what the token adds, or a special token's name; "" for an id without a token
    bytes: list[int] | None  # what the token adds, in UTF-8; None for a special token or no token


class TokenDecoder:
    """Decodes single tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._bytes_of = byte_speller(tokenizer)

    def decode(self, token: int) -> DecodedToken:
        # A model has more ids than its tokenizer has tokens, and any id may be a likely one.
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if token in self._special or not name:
            return DecodedToken(name, None)
        if self._bytes_of:
            data = self._bytes_of(token)
        elif match := BYTE.fullmatch(name):
            data = bytes([int(match.group(1), 16)])
        else:  # decoded twice, so that the space before the second shows
            first = decode(self._tokenizer, [token])
            data = decode(self._tokenizer, [token, token])[len(first) :].encode()
        return DecodedToken(data.decode(errors="backslashreplace"), list(data))


def usage(job: GenerationJob, results: Sequence[Stats]) -> Usage:
    """The token counts of a request, from its job and the statistics of its texts."""
    # Outside of documents, prompts are token ids; a prompt with several texts counts once.
    if job.document:
        prompt_tokens = sum(stats.prompt_tokens for stats in results)
    else:
        prompt_tokens = sum(len(cast(Sequence[int], prompt.source)) for prompt in job.prompts)
    generated = sum(stats.generated_tokens for stats in results)
    if any(prompt.prediction is not None for prompt in job.prompts):
        drafted = sum(stats.speculation.predicted for stats in results)
        accepted = sum(stats.speculation.predicted_accepted for stats in results)
    else:
        drafted = sum(stats.drafted for stats in results)
        accepted = sum(stats.accepted for stats in results)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=generated,
        total_tokens=prompt_tokens + generated,
        completion_tokens_details=responses.TokenDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        ),
    )


def speculation(chunk: Chunk) -> Fields:
    """The field `speculation` of a chunk: its tokens with their origins, and statistics.

    Text that was held back until the end, such as text that might have begun a stop string, is
    an extra entry in the list of tokens, with the origin "target".
    """
    # The last tokens of a stop string may have no piece of text.
    origins = zip(chunk.segments, chunk.origins, strict=False)
    tokens = [{"text": text, "origin": origin} for text, origin in origins]
    rest = chunk.text[sum(map(len, chunk.segments)) :]
    if rest:
        tokens.append({"text": rest, "origin": "target"})
    return {"tokens": tokens, "stats": chunk.stats}


class CompletionBuilder:
    """Builds the response to a request for completions, whole or in chunks (responses.py)."""

    response_type: type[BaseModel] = responses.Completion
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: TextRequest, model: str, decode: Callable[[int], DecodedToken]):
        self.stream, self.detailed = bool(body.stream), bool(body.speculation)
        self.logprobs = body.alternatives is not None
        self.usage_at_end = bool(body.stream_options and body.stream_options.include_usage)
        self._decode = decode
        self._common: Fields = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_kind if self.stream else self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._lengths: dict[int, int] = {}  # characters of each choice so far

    def response(self, choices: Sequence[Fields], **usage: Usage) -> BaseModel:
        """The whole response or one chunk; `choices` are made by `choice`."""
        return self.response_type(**self._common, choices=choices, **usage)

    def choice(self, chunk: Chunk) -> Fields:
        """A chunk as an entry of the response's `choices`."""
        result, text = chunk.result, chunk.text
        if result and not self.stream:  # the only chunk: the result has the whole text
            text = result.text or ""
        choice = {
            "index": chunk.index,
            "logprobs": self._logprobs(chunk) if self.logprobs else None,
            "finish_reason": result.finish_reason if result else None,
            **self._text(chunk.index, text),
        }
        if result and result.score is not None:
            choice["score"] = result.score
        if isinstance(chunk, DocumentChunk):
            return choice | chunk.fields
        if self.detailed:
            choice["speculation"] = speculation(chunk)
        return choice

    def _text(self, index: int, text: str) -> Fields:
        return {"text": text}

    def _logprobs(self, chunk: Chunk) -> Fields:
        entries, tokens = chunk.logprobs, completed(chunk)
        start = self._lengths.get(chunk.index, 0)
        *offsets, end = itertools.accumulate(map(len, tokens), initial=start)
        self._lengths[chunk.index] = end
        return {
            "tokens": tokens,
            "token_logprobs": [json_number(entry.logprob) for entry in entries],
            "top_logprobs": list(map(self._by_text, entries, tokens)),
            "text_offset": offsets,
        }

    def _by_text(self, entry: TokenLogprob, text: str) -> dict[str, float]:
        """The log-probabilities of the likeliest tokens by their texts.

        Other tokens that have the same text as the written token are left out.
        """
        named: dict[str, float] = {}
        for token, value in entry.top:
            if token == entry.token:
                named[text] = json_number(value)
            elif self._decode(token).text != text:
                # The likeliest comes first: of several tokens with one text it is kept.
                named.setdefault(self._decode(token).text, json_number(value))
        return named


class ChatBuilder(CompletionBuilder):
    """Builds the response to a request for a chat completion, whole or in chunks."""

    response_type = responses.ChatCompletion
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _text(self, index: int, text: str) -> Fields:
        message = {"content": text}
        if index not in self._lengths:  # the first chunk of this choice
            message["role"] = "assistant"
        self._lengths[index] = len(text)
        return {"delta" if self.stream else "message": message}

    def _logprobs(self, chunk: Chunk) -> Fields:
        return {"content": list(map(self._entry, chunk.logprobs)), "refusal": None}

    def _entry(self, entry: TokenLogprob) -> Fields:
        def named(token: int, value: float) -> Fields:
            decoded = self._decode(token)
            return {"token": decoded.text, "logprob": json_number(value), "bytes": decoded.bytes}

        top = [named(token, value) for token, value in entry.top]
        return {**named(entry.token, entry.logprob), "top_logprobs": top}


def completed(chunk: Chunk) -> list[str]:
    """The text that each token with a log-probability completed; joined, the chunk's text.

    So the text of a token may differ from its spelling: the last byte of a character completes the
    whole character, a special token completes no text, and text that may begin a stop string is
    held back until later tokens show whether it does.
    """
    count = len(chunk.logprobs)
    texts = [*chunk.segments, *[""] * count][:count]
    if texts:
        texts[-1] += chunk.text[sum(map(len, texts)) :]
    return texts


def json_number(logprob: float) -> float:
    """A log-probability for JSON, which has no -inf: at least -9999, as in OpenAI's API."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
