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

from mlx_t5.engine.documents import Answers
from mlx_t5.engine.rows import Chunk, PieceResult, Result
from mlx_t5.serving import api, schemas
from mlx_t5.serving.answers import CompletionBuilder, speculation
from mlx_t5.serving.errors import ApiError
from mlx_t5.serving.jobs import Update
from mlx_t5.serving.tokenizing import TokenizerThread
from mlx_t5.text.documents import Cutting, Document
from mlx_t5.text.markup import spans
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

    def read(_: Any) -> Document:
        found = spans(text, body.file_type) if body.file_type else None
        return Document(text, cutting, lambda prompt: len(ids_of(prompt)), max_source_tokens, found)

    cutting = Cutting(body.split or "none", prefix + own_prefix or None)
    document = await tokenizer.run(read)
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

    def __init__(self, builder: CompletionBuilder, document: Document):
        """Makes choices as `builder` does."""
        self.answer, self.logprobs, self.detailed = builder.answer, False, builder.detailed
        self._builder, self._answers = replace(builder, detailed=False), Answers(document)
        self._pieces = document.pieces

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
        answers, before = self._answers, len(self._answers.result.pieces)
        texts = [answers.add(cast(Result, update.chunk.result)) for update in updates]
        result, stats = None, vars(answers.stats) | {"pieces": len(self._pieces)}
        if len(answers.result.pieces) == len(self._pieces):
            texts.append(answers.finish())
            result = answers.result
            if result.error:
                raise ApiError(500, result.error)
        whole = Chunk("".join(texts), [], [], [], answers.stats, result)
        more = {
            "pieces": list(map(self._piece, updates, answers.result.pieces[before:])),
            "stats": schemas.DocumentStats.model_validate(stats),
        }
        choice = self._builder.choice(Update(0, whole, []), chunk)
        return [choice.model_copy(update=more)]

    def _piece(self, update: Update, result: PieceResult) -> schemas.Piece:
        piece: dict[str, Any] = {n: v for n, v in vars(result).items() if v is not None}
        if self.detailed and not result.error:
            piece["speculation"] = speculation(update)
        return schemas.Piece(**piece)
