"""Builds answers from the events of jobs: a whole answer, or its chunks (see responses.py)."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import BaseModel

from mlx_t5.engine.document_results import DocumentInFlight
from mlx_t5.engine.rows import Chunk, Result, Stats, TokenLogprob
from mlx_t5.serving import responses
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.queue import Event, GenerationJob, JobQueue, QueuedJob
from mlx_t5.serving.responses import AnsweredPiece, Usage
from mlx_t5.text.detokenizer import BYTE, byte_speller, decode

Fields = dict[str, Any]

if TYPE_CHECKING:
    from mlx_t5.serving.requests import TextRequest

LEAST_LOGPROB = -9999.0  # OpenAI's ChatCompletionTokenLogprob: "the token is very unlikely"


class EventStream:
    """The events of one job. The thread that owns MLX sends them; the event loop receives them."""

    def __init__(self, job: QueuedJob, jobs: JobQueue, receive: Callable[[], Any]):
        """Submits the job, and cancels it when `receive` (ASGI) reports that the client left.

        A document without words is not submitted, because nothing of it is decoded.
        """
        self.job: Any = job
        self._jobs = jobs
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.job.put = lambda event: loop.call_soon_threadsafe(self._events.put_nowait, event)
        if job.texts:
            jobs.add(job)
        self._watching = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Callable[[], Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # the event also comes when the response is complete
        self._jobs.cancel(self.job)
        self._events.put_nowait(ApiError(499, "the client went away"))

    def close(self) -> None:
        self._watching.cancel()
        self._jobs.cancel(self.job)

    async def next(self) -> Any:
        """Waits for the next event; raises `ApiError` if the job failed or the client left."""
        event = await self._events.get()
        if isinstance(event, ApiError):
            raise event
        return event

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yields all chunks of a job that decodes; a text that is not streamed has one chunk."""
        unfinished = self.job.texts
        while unfinished:
            chunk = await self.next()
            unfinished -= chunk.result is not None
            yield chunk


@dataclass
class DocumentChunk(Chunk):
    """Answers to pieces of a document, as a chunk of the document's answer."""

    fields: Fields = field(default_factory=dict)  # `pieces` and `stats` of a choice


async def joined(
    chunks: AsyncIterator[Chunk], document: DocumentInFlight, streamed: bool, detailed: bool
) -> AsyncIterator[DocumentChunk]:
    """Joins the answers to a document's pieces, which come in any order.

    Args:
        chunks: the answers.
        document: the document, without answers.
        streamed: whether to yield a chunk per piece, in order; otherwise one chunk has the whole.
        detailed: whether to report the origin of each token (draft, copy or target).

    Raises:
        ApiError: no piece could be decoded.
    """
    early, result, shown = dict[int, Chunk](), document.result, list[AnsweredPiece]()
    if not document.prompts:
        fields: Fields = {"pieces": [], "stats": vars(document.stats)}
        text = result.text or ""
        yield DocumentChunk(text, [], [], [], document.stats, result, fields=fields)
    async for chunk in chunks:
        early[chunk.index] = chunk
        while piece := early.pop(len(result.pieces), None):
            kept = document.stats.kept
            added = document.add(cast(Result, piece.result))
            if added.result and added.result.error:
                raise ApiError(500, added.result.error)
            fields = {name: v for name, v in vars(result.pieces[-1]).items() if v is not None}
            if detailed and document.stats.kept == kept:  # else the tokens are not in the document
                fields["speculation"] = speculation(piece)
            shown.append(AnsweredPiece(**fields))
            if streamed or document.complete:
                stats = vars(document.stats) | {"pieces": len(document.prompts)}
                fields = {"pieces": shown, "stats": stats}
                whole = added.result
                yield DocumentChunk(added.text, [], [], [], document.stats, whole, fields=fields)
                shown = []


class Spelling(NamedTuple):
    r"""How an answer spells a token whose log-probability it reports.

    Bytes that are no whole character are escaped in `text`, as in OpenAI's API (`\xe4`).
    """

    text: str  # what the token adds, or a special token's name; "" for an id without a token
    bytes: list[int] | None  # what the token adds, in UTF-8; None for a special token or no token


class TokenSpelling:
    """A function that returns the `Spelling` of a token id."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._spell = byte_speller(tokenizer)

    def __call__(self, token: int) -> Spelling:
        # A model has more ids than its tokenizer has tokens, and any id may be a likely one.
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if token in self._special or not name:
            return Spelling(name, None)
        if self._spell:
            data = self._spell(token)
        elif match := BYTE.fullmatch(name):
            data = bytes([int(match.group(1), 16)])
        else:  # decoded twice, so that the space before the second shows
            first = decode(self._tokenizer, [token])
            data = decode(self._tokenizer, [token, token])[len(first) :].encode()
        return Spelling(data.decode(errors="backslashreplace"), list(data))


def usage(job: GenerationJob, results: Sequence[Stats]) -> Usage:
    """The token counts of a request, from its job and the statistics of its texts."""
    # Outside of documents, prompts are token ids; a prompt with several texts counts once.
    if job.document:
        prompt_tokens = sum(stats.prompt_tokens for stats in results)
    else:
        sources: Any = [prompt.source for prompt in job.prompts]
        prompt_tokens = sum(map(len, sources))
    predicted = any(prompt.prediction is not None for prompt in job.prompts)
    written = sum(stats.generated_tokens for stats in results)
    counted: list[Any] = [s.speculation if predicted else s for s in results]
    names = ("predicted", "predicted_accepted") if predicted else ("drafted", "accepted")
    drafted, accepted = (sum(getattr(one, name) for one in counted) for name in names)
    details = {"accepted_prediction_tokens": accepted}
    details["rejected_prediction_tokens"] = drafted - accepted
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=written,
        total_tokens=prompt_tokens + written,
        completion_tokens_details=responses.TokenDetails(**details),
    )


def speculation(chunk: Chunk) -> Fields:
    """The field `speculation` of a chunk: its tokens with their origins, and statistics.

    Text that was held back until the end, such as text that might have begun a stop string, is
    an extra entry in the list of tokens, with the origin "target".
    """
    # The last tokens of a stop string may have no piece of text.
    written = [*zip(chunk.pieces, chunk.writers, strict=False)]
    if rest := chunk.text[sum(map(len, chunk.pieces)) :]:
        written.append((rest, "target"))
    tokens = [{"text": text, "writer": writer} for text, writer in written]
    return {"tokens": tokens, "stats": chunk.stats}


class CompletionBuilder:
    """Builds the answer to a request for completions, whole or in chunks (responses.py)."""

    def __init__(self, body: TextRequest, model: str, spell: Callable[[int], Spelling]):
        self._model, self._spell = model, spell
        self.stream, self.detailed = bool(body.stream), bool(body.speculation)
        self.logprobs = body.alternatives is not None
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._lengths: dict[int, int] = {}  # characters of each choice so far

    def answer(self, choices: Sequence[Fields], counts: Usage | None) -> BaseModel:
        """The whole answer or one chunk; `choices` are made by `choice`."""
        return responses.Completion(
            object="text_completion", **self._fields("cmpl", choices, counts)
        )

    def _fields(self, kind: str, choices: Sequence[Fields], counts: Usage | None) -> Fields:
        fields = {"id": f"{kind}-{self._id}", "created": self._created, "model": self._model}
        return fields | {"choices": choices} | ({} if counts is None else {"usage": counts})

    def choice(self, chunk: Chunk) -> Fields:
        """A chunk as an entry of the answer's `choices`."""
        result = chunk.result
        # If the answer is not streamed, its only chunk has the whole text in the result.
        text = chunk.text if self.stream or not result else result.text or ""
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
            elif (name := self._spell(token).text) != text:
                # The likeliest comes first: of several tokens with one text it is kept.
                named.setdefault(name, json_number(value))
        return named


class ChatBuilder(CompletionBuilder):
    """Builds the answer to a request for a chat completion, whole or in chunks."""

    def answer(self, choices: Sequence[Fields], counts: Usage | None) -> BaseModel:
        kind: Any = "chat.completion.chunk" if self.stream else "chat.completion"
        return responses.ChatCompletion(object=kind, **self._fields("chatcmpl", choices, counts))

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
            text, spelled = self._spell(token)
            return {"token": text, "logprob": json_number(value), "bytes": spelled}

        top = [named(*other) for other in entry.top]
        return {**named(entry.token, entry.logprob), "top_logprobs": top}


def completed(chunk: Chunk) -> list[str]:
    """The text that each token with a log-probability completed; joined, the chunk's text.

    So the text of a token may differ from its spelling: the last byte of a character completes the
    whole character, a special token completes no text, and text that may begin a stop string is
    held back until later tokens show whether it does.
    """
    count = len(chunk.logprobs)
    texts = [*chunk.pieces, *[""] * count][:count]
    if texts:
        texts[-1] += chunk.text[sum(map(len, texts)) :]
    return texts


def json_number(logprob: float) -> float:
    """A log-probability for JSON, which has no -inf: at least -9999, as in OpenAI's API."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
