"""A request's text, cut into the pieces of a document."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from mlx_t5.serving.api import ChatRequest, CompletionRequest
from mlx_t5.serving.errors import ApiError
from mlx_t5.text.documents import Cutting, Document
from mlx_t5.text.tokenizer import encode

if TYPE_CHECKING:
    from mlx_t5.serving.service import Service

MAX_PIECES = 50_000  # a document; a body of 1 MiB has some 10,000 sentences
PIECES_AT_ONCE = 64  # between which the tokenizer's thread has time for others


async def cut(service: Service, body: CompletionRequest | ChatRequest) -> Document:
    """A request's document; its prefix is that of its task, then a chat's system message.

    Raises:
        ApiError: it cannot be cut, or has no piece or too many.
    """
    messages = [m.text for m in body.messages] if isinstance(body, ChatRequest) else [body.prompt]
    *system, text = cast(list[str], messages)
    _require_one(body, text)
    own_prefix = "".join(part.strip() + " " for part in system).lstrip()
    prefix, limit = service.task(body.task, []).prefix + own_prefix, service.max_source_tokens
    cutting = Cutting(body.split or "none", prefix or None, file_type=body.file_type or "")

    def read(t: Any) -> Document:
        return Document(text, cutting, lambda prompt: len(encode(t, prompt)), limit)

    document = await service.tokenizer.run(read)
    pieces = document.cut()
    while await service.tokenizer.run(lambda _: list(islice(pieces, PIECES_AT_ONCE))):
        if len(document.pieces) > MAX_PIECES:
            message = f"the text has more than {MAX_PIECES} pieces; send it in parts"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
    if not document.pieces:
        raise ApiError(400, "there is no word in the text; write what to work on", "prompt")
    return document


def _require_one(body: CompletionRequest | ChatRequest, text: Any) -> None:
    """Refuses what does not go with one text in pieces."""
    asked = {"n": (body.n or 1) > 1, "logprobs": body.alternatives is not None}
    asked |= {"prediction": bool(body.prediction), "prompt": not isinstance(text, str)}
    for name, refused in asked.items():
        if refused:
            message = f"{name}: a text that is split is one prompt, as text, and has one answer"
            raise ApiError(400, f"{message} without logprobs or prediction", name)
