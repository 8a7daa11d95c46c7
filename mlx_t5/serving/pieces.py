"""Cuts the documents of requests into pieces lazily, and joins the answers of the pieces.

Cutting and joining take time, so a separate thread does both. Even if a text has many pieces, only
a few of them are in memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, cast

from mlx_t5.engine.document_batch import DocumentInFlight
from mlx_t5.engine.rows import Chunk, Result
from mlx_t5.serving.answers import DocumentChunk, EventStream, speculation
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.jobs import GenerationJob
from mlx_t5.serving.schemas import AnsweredPiece
from mlx_t5.serving.tokenizing import TokenizerThread
from mlx_t5.text.documents import Cutting, Document
from mlx_t5.text.prompts import token_ids

log = logging.getLogger(__name__)

MAX_TOKENS = 2_000_000  # of all prompts of a document; with ByT5 a body of 1 MiB has 1,000,000
LEAST_TOKENS = 40  # a shorter prompt counts as this many, so there are at most 50,000 prompts
PIECES_AT_ONCE = 64  # counted in one call; between calls, the thread serves other documents
HANDED_IN = 3  # unfinished pieces that have been submitted, per row of the document


class Pieces:
    """The pieces of a document that is being decoded; used in the thread that cuts documents.

    Attributes:
        answers: the results of the pieces so far.
        count: expected number of pieces; there are more if a sentence is too long.
    """

    def __init__(
        self, document: Document, read: Callable[[str], list[int]], count: int, detailed: bool
    ):
        """Prepares to cut a document; no piece is cut yet.

        Args:
            document: the document.
            read: returns the tokens of a prompt.
            count: expected number of pieces.
            detailed: whether to report the origin of each token (draft, copy or target).
        """
        self.answers, self.count = DocumentInFlight(document), count
        self._read, self._detailed = read, detailed
        self._prompts, self._tokens = self.answers.prompts(), 0
        self._early, self._done = dict[int, Chunk](), 0

    def draw(self, most: int) -> list[list[int]]:
        """Cuts the next pieces of the document, up to `most`; returns their prompts' tokens.

        Raises:
            ApiError: the document has too many tokens.
        """
        ids = [self._read(prompt) for prompt in islice(self._prompts, most)]
        self._tokens += sum(max(len(prompt), LEAST_TOKENS) for prompt in ids)
        require_few(self._tokens)
        return ids

    def advance(
        self, chunks: Sequence[Chunk], most: int, _: Any = None
    ) -> tuple[list[DocumentChunk], list[list[int]]]:
        """Joins the answers of finished pieces, and cuts further pieces to be submitted.

        Args:
            chunks: the chunks of finished pieces, in any order.
            most: maximum number of submitted pieces that are not finished.

        Returns:
            The chunks of the document's text, in order, and the tokens of the further pieces.

        Raises:
            ApiError: the document has too many tokens, or no piece could be decoded.
        """
        self._done += len(chunks)
        self._early |= {chunk.index: chunk for chunk in chunks}
        gained = []
        while chunk := self._early.pop(len(self.answers.result.pieces), None):
            gained.append(self._joined(chunk))
        return gained, self.draw(most - self.answers.drawn + self._done)

    def _joined(self, chunk: Chunk) -> DocumentChunk:
        """Appends the next piece's answer to the document's answer; returns the appended part."""
        answers, result = self.answers, None
        text = answers.add(cast(Result, chunk.result))
        if answers.complete:
            text, result = text + answers.finish(), answers.result
            if result.error:
                raise ApiError(500, result.error)
        fields = vars(answers.result.pieces[-1])
        piece = {name: value for name, value in fields.items() if value is not None}
        piece |= {"speculation": speculation(chunk)} if self._detailed else {}
        stats = vars(answers.stats) | {"pieces": max(self.count, answers.drawn)}
        fields = {"pieces": [piece], "stats": stats}
        return DocumentChunk(text, [], [], [], answers.stats, result, fields=fields)


async def cut(
    thread: TokenizerThread,
    text: str,
    cutting: Cutting,
    limit: int,
    prefixes: Sequence[str],
    detailed: bool = False,
) -> Pieces:
    """Counts the pieces of a text, and returns a `Pieces`, which cuts the text lazily.

    Args:
        thread: the thread that cuts documents.
        text: the text to cut.
        cutting: how to cut the text.
        limit: maximum number of tokens in a piece's prompt.
        prefixes: prefixes of the model's own tasks; the text may begin with one of them.
        detailed: whether to report the origin of each token (draft, copy or target).

    Raises:
        ApiError: the text cannot be cut, has no words, or has too many pieces.
    """

    @lru_cache(maxsize=4)  # before a piece is yielded, it and the next piece have been read
    def read(prompt: str) -> list[int]:
        return token_ids(prompt, thread.tokenizer, thread.vocab_size)

    def begin(_: Any) -> tuple[Document, int, Document]:
        document = Document(text, cutting, lambda prompt: len(read(prompt)), limit, prefixes)
        least = max(LEAST_TOKENS, len(read(document.prefix + "a")))
        return document, least, Document(text, cutting, lambda prompt: 0, prefixes=prefixes)

    def some(_: Any) -> int:
        return sum(1 for _ in islice(pieces, PIECES_AT_ONCE))

    document, least, counted = await thread.run(begin)
    if document.doubtful:
        log.info("a text may begin with a prefix; to use one, send task or a system message")
    pieces, count = counted.cut(), 0
    while more := await thread.run(some):
        count += more
        require_few(count * least)
    if not count:
        raise ApiError(400, "there is no word in the text; write what to work on", "prompt")
    return Pieces(document, read, count, detailed)


def require_few(tokens: int) -> None:
    """Raises `ApiError` if the prompts of a document have more than `MAX_TOKENS` tokens."""
    if tokens > MAX_TOKENS:
        most = f"more than {MAX_TOKENS} tokens (each piece counts as {LEAST_TOKENS} at least)"
        message = f"the pieces of the text, each with its prefix, have {most}; send it in parts"
        raise ApiError(400, message, "prompt", "context_length_exceeded")


class DocumentStream(EventStream[GenerationJob]):
    """Turns the events of a document's job into chunks of the document's text."""

    def __init__(self, pieces: Pieces, first: list[list[int]], thread: TokenizerThread, *job: Any):
        """Submits the job of a document, and its first pieces.

        Args:
            pieces: the document's pieces.
            first: tokens of the prompts of the first pieces.
            thread: the thread that cuts the remaining pieces and joins the answers.
            *job: the arguments of `EventStream`.
        """
        super().__init__(*job)
        self._pieces, self._thread, self._json = pieces, thread, list[str]()
        self._jobs.extend(self.job, first, pieces.answers.whole)

    async def chunks(self, first: Chunk) -> AsyncIterator[DocumentChunk]:
        """Yields the chunks of the document's text, in order; the last chunk has the result."""
        events, answers, most = [first], self._pieces.answers, HANDED_IN * self.job.place.size
        while True:
            work = partial(self._pieces.advance, events, most)
            gained, prompts = await self._thread.run(work)
            if prompts:
                self._jobs.extend(self.job, prompts, answers.whole)
            for chunk in gained:
                yield chunk
            if answers.complete:
                return
            events = [await self.next()]
            while not self._events.empty():
                events.append(await self.next())

    async def finished(self) -> list[Chunk]:
        """Waits for the whole document, and returns only its last chunk.

        The chunk's list of pieces is empty; `complete` inserts the pieces into the answer.
        """
        async for chunk in self.chunks(await self.next()):
            (piece,) = chunk.fields["pieces"]
            self._json.append(AnsweredPiece(**piece).model_dump_json(exclude_unset=True))
        return [replace(chunk, fields={**chunk.fields, "pieces": []})]

    def complete(self, body: str) -> str:
        """Fills the empty list `"pieces":[]` in the answer's JSON body, and returns the body.

        No text in the body contains the string `"pieces":[]`, because JSON escapes quotes.
        """
        return body.replace('"pieces":[]', f'"pieces":[{",".join(self._json)}]', 1)
