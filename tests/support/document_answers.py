"""A document whose pieces are answered."""

from collections.abc import Sequence

from mlx_t5.text.documents import Document


def joined(document: Document, answers: Sequence[str | None]) -> str:
    """The document with the pieces' answers in their places, None for one that failed."""
    texts = [document.answered(*pair) for pair in zip(document.pieces, answers, strict=True)]
    parts = [document.part(i, texts) for i in range(len(texts))]
    return "".join([*parts, document.before(len(texts))])
