"""Which --delta and --num-draft to use, from the measured grid."""

from __future__ import annotations

from collections.abc import Sequence

NEAR = 0.02  # settings whose speeds differ by less are taken for equally fast


def recommend(rows: Sequence[dict], tolerance: float) -> dict | None:
    """The fastest setting that loses at most so much quality.

    Noise must not argue for relaxation, so from one delta to a greater one it takes a gain that is
    seen in every repeat: even the slowest of the greater delta beats the smaller delta's figure.

    Args:
        rows: of the grid, some with delta 0; `quality` of `quality.py` and "speed_up" in each.
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
    best = None
    for delta in sorted({row["delta"] for row in allowed}):
        own = _fastest([row for row in allowed if row["delta"] == delta])
        if best is None or own["speed_up"].low > (1 + NEAR) * best["speed_up"].value:
            best = own
    return best if best["speed_up"].value > 1 else None


def _fastest(rows: Sequence[dict]) -> dict:
    """Of those about as fast as the fastest, the one with the fewest proposals."""
    fastest = max(row["speed_up"].value for row in rows)
    near = [row for row in rows if row["speed_up"].value >= (1 - NEAR) * fastest]
    return min(near, key=lambda row: row["num_draft"])


def measures(rows: Sequence[dict]) -> tuple[str, str]:
    """The figures that judge: against the references if these are known."""
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
        f"where even its slowest repeat is {NEAR:.0%} faster than what a smaller one reached."
    )


def _setting(row: dict | None) -> str:
    if row is None:
        return "--regular-decode; no setting of this grid is faster"
    delta = f"--delta {row['delta']:g} " if row["delta"] else ""
    return f"{delta}--num-draft {row['num_draft']}, {row['speed_up']} times regular decoding"
