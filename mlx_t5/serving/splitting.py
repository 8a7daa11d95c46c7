"""A request's text, cut into the pieces of a document.

They are cut and tokenized a few at a time, so that the thread that does it has time for others.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import Any, cast

from mlx_t5.serving import api
from mlx_t5.serving.errors import ApiError
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
