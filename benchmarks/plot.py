"""The picture of a sweep: speed-ups with theory's beside them, and quality against delta."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.extras import needed

GREY = "0.45"


def draw(rows: Sequence[dict], best: dict | None, title: str, file: Path) -> None:
    """Writes the picture, whose format follows from the file's name.

    Args:
        rows: of the grid, as sweep.py makes them.
        best: the recommended one of them, to be marked; None if there is none.
        title: where the figures come from.
        file: where to.
    """
    figure = needed("matplotlib.figure").Figure(figsize=(12, 5.2), layout="constrained")
    needed("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9, color=GREY)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _speeds(left, rows, best)
    _qualities(right, rows)
    figure.savefig(file, dpi=150)


def _speeds(axes: Any, rows: Sequence[dict], best: dict | None) -> None:
    """Decoding speed-up by the number of proposals, a colour for each delta."""
    deltas = sorted({row["delta"] for row in rows})
    colours = needed("matplotlib").colormaps["viridis"]
    for place, delta in enumerate(deltas):
        own = sorted((r for r in rows if r["delta"] == delta), key=lambda row: row["num_draft"])
        colour = colours(0.9 * place / max(len(deltas) - 1, 1))
        lengths = [row["num_draft"] for row in own]
        speeds = [row["decode_speed_up"] for row in own]
        # A range may lie on one side of its median-based value.
        below = [max(s.value - s.low, 0) for s in speeds]
        above = [max(s.high - s.value, 0) for s in speeds]
        # Side by side, so that the bars of one number do not hide each other.
        shifted = [n + 0.05 * (place - (len(deltas) - 1) / 2) for n in lengths]
        values = [s.value for s in speeds]
        label = f"δ = {delta:g}"
        axes.errorbar(shifted, values, (below, above), fmt="o-", color=colour, label=label,
                      markersize=4, linewidth=1.4, elinewidth=0.7, capsize=2)  # fmt: skip
        axes.plot(lengths, [row["predicted"] for row in own], "--", color=colour, linewidth=1)
        if best and best["delta"] == delta:
            at = lengths.index(best["num_draft"])
            axes.plot(shifted[at], values[at], "o", color="C3", markersize=12, fillstyle="none",
                      label="recommended")  # fmt: skip
    axes.plot([], [], "--", color=GREY, linewidth=1, label="theory")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.annotate("regular", (1, 1), (3, 0), xycoords=("axes fraction", "data"), va="center",
                  textcoords="offset points", fontsize=8, color=GREY)  # fmt: skip
    axes.set_xticks(sorted({row["num_draft"] for row in rows}))
    axes.set(xlabel="proposals a step, γ (--num-draft)", ylabel="decoding, times regular")
    axes.set_title("Speed: measured with range, and theory from α, c and v(M)", fontsize=10)
    axes.legend(fontsize=8, ncols=2)
    _tidy(axes)


def _qualities(axes: Any, rows: Sequence[dict]) -> None:
    """Exact match and chrF by delta: their mean over the numbers of proposals, and the range."""
    deltas = sorted({row["delta"] for row in rows})
    # Evenly spaced, as what happens often happens close to 1.
    places = list(range(len(deltas)))
    lines = {
        "exact_match": ("exact match, references", "C3", "o-"),
        "chrf": ("chrF, references", "C0", "o-"),
        "exact_match_lossless": ("exact match, δ = 0", "C3", "s:"),
        "chrf_lossless": ("chrF, δ = 0", "C0", "s:"),
    }
    for name, (label, colour, style) in lines.items():
        if any(row[name] is None for row in rows):
            continue
        own = [[row[name] for row in rows if row["delta"] == delta] for delta in deltas]
        means = [sum(values) / len(values) for values in own]
        axes.plot(places, means, style, color=colour, label=label, markersize=4, linewidth=1.4)
        axes.fill_between(places, list(map(min, own)), list(map(max, own)), color=colour,
                          alpha=0.12, linewidth=0)  # fmt: skip
    axes.set_xticks(places, [f"{delta:g}" for delta in deltas])
    axes.set(xlabel="relaxation δ (--delta)", ylabel="points of 100")
    axes.set_title("Quality: mean over γ, shaded from least to most", fontsize=10)
    axes.legend(fontsize=8)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
