"""How good texts are: exact match and chrF, in points of 100.

chrF (https://aclanthology.org/W15-3049) compares runs of characters, so it tells a wrong letter
from a wrong sentence, which exact match does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.extras import needed


def exact_match(texts: Sequence[str], right: Sequence[str]) -> float:
    """The share of texts that are exactly right, in percent."""
    return 100 * sum(a == b for a, b in zip(texts, right, strict=True)) / len(texts)


def chrf(texts: Sequence[str], right: Sequence[str]) -> float:
    """sacrebleu's chrF2 of all texts together, 0 to 100."""
    return needed("sacrebleu").corpus_chrf(list(texts), [list(right)]).score


def quality(
    texts: Sequence[str], references: Sequence[str] | None, lossless: Sequence[str]
) -> dict[str, float | None]:
    """Both figures, against the right answers where they are known and against delta = 0."""
    return {
        "exact_match": None if references is None else exact_match(texts, references),
        "chrf": None if references is None else chrf(texts, references),
        "exact_match_lossless": exact_match(texts, lossless),
        "chrf_lossless": chrf(texts, lossless),
    }


def points(name: str) -> Callable[[dict], str]:
    """How a table writes one of these figures, which may be unknown."""
    return lambda row: "" if row[name] is None else f"{row[name]:.1f}"
