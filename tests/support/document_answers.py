"""Joins the answers of a document's pieces."""

from collections.abc import Sequence

from mlx_t5.text.documents import Document


def joined(document: Document, answers: Sequence[str | None]) -> str:
    """Returns the document with answers in place of its pieces; None: the piece failed."""
    texts = [document.answered(*pair) for pair in zip(document.pieces, answers, strict=True)]
    parts = [document.part(i, texts) for i in range(len(texts))]
    return "".join([*parts, document.before(len(texts))])
