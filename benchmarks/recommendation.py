"""Which --delta and --num-draft to use, from the measured grid."""

from __future__ import annotations

from collections.abc import Sequence

NEAR = 0.02  # settings whose speeds differ by less are taken for equally fast


def recommend(rows: Sequence[dict], tolerance: float) -> dict | None:
    """The fastest setting that loses at most so much quality.

    Of settings about as fast the one with the least delta is taken, and of those the one with the
    fewest proposals: noise must not decide for more relaxation than pays.

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
    fastest = max(row["speed_up"].value for row in allowed)
    if fastest <= 1:
        return None
    near = [row for row in allowed if row["speed_up"].value >= (1 - NEAR) * fastest]
    return min(near, key=lambda row: (row["delta"], row["num_draft"]))


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
        f"most {tolerance:g} points below those of delta 0, on {count} prompts. Settings within "
        f"{NEAR:.0%} of the fastest count as equally fast; of those the least delta is taken, "
        "then the fewest proposals."
    )


def _setting(row: dict | None) -> str:
    if row is None:
        return "--regular-decode; no setting of this grid is faster"
    delta = f"--delta {row['delta']:g} " if row["delta"] else ""
    return f"{delta}--num-draft {row['num_draft']}, {row['speed_up']} times regular decoding"
