"""Documents: a request's text cut into pieces, and the one choice that their answers make.

Pieces are cut and tokenized a few at a time, so that the thread that does it has time for others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from pydantic import BaseModel

from mlx_t5.engine.rows import Chunk, Result, Stats
from mlx_t5.serving import answers, api, schemas
from mlx_t5.serving.errors import ApiError
from mlx_t5.serving.jobs import Update
from mlx_t5.serving.tokenizing import TokenizerThread
from mlx_t5.text.documents import Cutting, Document
from mlx_t5.text.prompts import token_ids

MAX_PIECES = 50_000  # a document; a body of 1 MiB has some 10,000 sentences
PIECES_AT_ONCE = 64


async def cut(
    tokenizer: TokenizerThread,
    body: api.CompletionRequest | api.ChatRequest,
    prefix: str,
    max_source_tokens: int,
) -> tuple[Document, list[list[int]]]:
    """A request's document, and the tokens of each of its pieces.

    Args:
        tokenizer: that reads it.
        body: the request.
        prefix: of its task.
        max_source_tokens: of a piece.

    Raises:
        ApiError: it cannot be cut, has no piece or too many.
    """
    text, own_prefix = text_of(body)

    @lru_cache(maxsize=1)  # a piece is counted, and then taken
    def ids_of(prompt: str) -> list[int]:
        return token_ids(prompt, tokenizer.tokenizer, tokenizer.vocab_size)

    cutting = Cutting(body.split or "none", prefix + own_prefix or None)
    count = lambda prompt: len(ids_of(prompt))  # noqa: E731
    document = await tokenizer.run(lambda _: cutting.document(text, count, max_source_tokens))
    ids: list[list[int]] = []
    pieces = document.cut()
    while some := await tokenizer.run(
        lambda _: [ids_of(document.prompt(piece)) for piece in islice(pieces, PIECES_AT_ONCE)]
    ):
        ids += some
        if len(ids) > MAX_PIECES:
            message = f"the text has more than {MAX_PIECES} pieces; send it in parts"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
    if not ids:
        raise ApiError(400, "there is no word in the text; write what to work on", "prompt")
    return document, ids


def text_of(body: api.CompletionRequest | api.ChatRequest) -> tuple[str, str]:
    """A request's text, and what its system message puts before each piece of it.

    Raises:
        ApiError: it asks for what a text that is split cannot have.
    """
    refusals = [
        ("n", (body.n or 1) > 1, "split gives one text; leave n out"),
        ("prediction", body.prediction, "split: no piece has a prediction; leave it out"),
        ("logprobs", body.alternatives is not None, "split gives no logprobs; leave them out"),
    ]
    if isinstance(body, api.CompletionRequest):
        text, prefix = cast(str, body.prompt), ""
        refusals.append(("prompt", not isinstance(text, str), "split needs one prompt, as text"))
    else:
        *system, user = body.messages
        text = user.text
        prefix = "".join(message.text.strip() + " " for message in system).lstrip()
    for param, refused, message in refusals:
        if refused:
            raise ApiError(400, message, param)
    return text, prefix


class DocumentBuilder:
    """Makes one choice of the answers to a document's pieces.

    Attributes:
        answer: as of `CompletionBuilder`, like the other two.
        logprobs: none.
        detailed: whether to say who wrote each token, piece by piece.
    """

    def __init__(self, builder: answers.CompletionBuilder, document: Document):
        """Makes choices as `builder` does."""
        self.answer, self.logprobs, self.detailed = builder.answer, False, builder.detailed
        self._builder, self._document = replace(builder, detailed=False), document
        cut = sum(piece.cut for piece in document.pieces)
        self._stats = schemas.DocumentStats(pieces=len(document.pieces), cut=cut, failed=0)
        self._done, self._is_short = 0, False  # as far as updates have come

    async def ordered(self, updates: AsyncIterator[Update]) -> AsyncIterator[Update]:
        """The updates in the order of the text, each as soon as it and all before it are there."""
        early: dict[int, Update] = {}
        done = 0
        async for update in updates:
            early[update.index] = update
            while done in early:
                yield early.pop(done)
                done += 1

    def choices(self, updates: Sequence[Update], chunk: bool) -> list[BaseModel]:
        """The choice, or in a chunk what is added to it; of updates that follow the last ones."""
        document, pieces = self._document, [self._piece(update) for update in updates]
        parts = [document.before(u.index) + p.text for u, p in zip(updates, pieces, strict=True)]
        self._done += len(pieces)
        self._is_short |= any(piece.finish_reason == "length" for piece in pieces)
        self._stats.failed += sum(piece.finish_reason == "error" for piece in pieces)
        result = None
        if self._done == self._stats.pieces:
            parts.append(document.before(self._done))
            reason = "length" if self._is_short else "stop"
            result = Result("".join(parts), [], [], reason, Stats())
        whole = Update(0, Chunk("".join(parts), [], [], [], Stats(), result), [])
        choice = self._builder.choice(whole, chunk)
        return [choice.model_copy(update={"pieces": pieces, "stats": self._stats})]

    def _piece(self, update: Update) -> schemas.Piece:
        piece, result = self._document.pieces[update.index], update.chunk.result
        assert result is not None, "pieces are sent at their end"
        more: dict[str, Any] = {"error": result.error} if result.error else {}
        if self.detailed and not result.error:
            more["speculation"] = answers.speculation(update)
        return schemas.Piece(
            start=piece.start,
            end=piece.end,
            text=self._document.answered(piece, result.text),
            finish_reason=cast(Any, result.finish_reason),
            **more,
        )
