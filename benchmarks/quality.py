"""How good texts are, and which --delta and --num-draft to use, from a measured grid.

Quality is exact match and chrF, in points of 100.
chrF (https://aclanthology.org/W15-3049) compares runs of characters, so it tells a wrong letter
from a wrong sentence, which exact match does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

NEAR = 0.02  # settings whose speeds differ by less are taken for equally fast


def exact_match(texts: Sequence[str], right: Sequence[str]) -> float:
    """The share of texts that are exactly right, in percent."""
    return 100 * sum(a == b for a, b in zip(texts, right, strict=True)) / len(texts)


def chrf(texts: Sequence[str], right: Sequence[str]) -> float:
    """sacrebleu's chrF2 of all texts together, 0 to 100."""
    from sacrebleu import corpus_chrf

    return corpus_chrf(list(texts), [list(right)]).score


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


def recommend(rows: Sequence[dict], tolerance: float) -> dict | None:
    """The fastest setting that loses at most so much quality.

    Noise must not argue for relaxation, so from one delta to a greater one it takes a reason, that
    passes of the target yield more tokens with as many proposals, and a gain that is seen in every
    repeat: even the slowest of the greater delta beats the smaller delta's figure.

    Args:
        rows: of the whole grid, delta 0 included; what `quality` returns, "speed_up" and
            "tokens_per_call" in each.
        tolerance: points of exact match, and of chrF, that may be lost against delta 0. They are
            those against the references, or against delta 0 itself if there are none.

    Returns:
        A row; None if none is faster than regular decoding.
    """
    names = measures(rows)
    lossless = next(row for row in rows if row["delta"] == 0)
    allowed = [
        row for row in rows if all(row[name] >= lossless[name] - tolerance for name in names)
    ]
    best = _fastest([row for row in allowed if row["delta"] == 0])
    for delta in sorted({row["delta"] for row in allowed} - {0}):
        other = _fastest([row for row in allowed if row["delta"] == delta])
        before = _at(rows, best["delta"], other["num_draft"])
        more = other["tokens_per_call"] > (1 + NEAR) * before["tokens_per_call"]
        if more and other["speed_up"].low > (1 + NEAR) * best["speed_up"].value:
            best = other
    return best if best["speed_up"].value > 1 else None


def _at(rows: Sequence[dict], delta: float, num_draft: int) -> dict:
    return next(row for row in rows if (row["delta"], row["num_draft"]) == (delta, num_draft))


def _fastest(rows: Sequence[dict]) -> dict:
    """Of those about as fast as the fastest, the one with the fewest proposals."""
    fastest = max(row["speed_up"].value for row in rows)
    near = [row for row in rows if row["speed_up"].value >= (1 - NEAR) * fastest]
    return min(near, key=lambda row: row["num_draft"])


def measures(rows: Sequence[dict]) -> tuple[str, str]:
    """Names of the two figures that judge, against the references where these are known."""
    known = all(row["chrf"] is not None for row in rows)
    return ("exact_match", "chrf") if known else ("exact_match_lossless", "chrf_lossless")


def explain(rows: Sequence[dict], tolerance: float, count: int) -> str:
    """The lines that tell the user what to use, and how that was chosen.

    Args:
        rows: as for `recommend`.
        tolerance: as for `recommend`.
        count: prompts by which quality was judged.
    """
    against = "the references" if measures(rows)[1] == "chrf" else "delta 0's texts"
    best = recommend(rows, tolerance)
    exact = recommend([row for row in rows if row["delta"] == 0], tolerance)
    return (
        f"lossless: {_setting(exact)}\n"
        f"recommended: {_setting(best)}\n"
        f"Recommended is the fastest setting whose exact match and chrF against {against} are at "
        f"most {tolerance:g} points below those of delta 0, on {count} prompts. Of settings within "
        f"{NEAR:.0%} of each other the one with fewer proposals is taken, and a greater delta only "
        f"where a target call yields {NEAR:.0%} more tokens with as many proposals and even the "
        f"slowest repeat is {NEAR:.0%} faster than what the smaller delta reached."
    )


def _setting(row: dict | None) -> str:
    if row is None:
        return "--regular-decode; no setting of this grid is faster"
    delta = f"--delta {row['delta']:g} " if row["delta"] else ""
    return f"{delta}--num-draft {row['num_draft']}, {row['speed_up']} times regular decoding"
