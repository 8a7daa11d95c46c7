"""Draws speed against the number of proposals, and quality against delta."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_t5.settings import AUTO

GRAY = "0.4"
LETTERS_A_PANEL = 75  # of a caption's line
Lines = Mapping[str, Sequence[dict]]  # rows of a table, by the label of the line to draw


def draw_ways(tables: Sequence[dict], title: str, file: Path) -> None:
    """One panel for each table of `compare`; a star marks `auto`, at its mean of proposals."""
    figure, panels = _figure(title, len(tables))
    for axes, table in zip(panels, tables, strict=True):
        ways: dict[str, list[dict]] = {}
        for row in table["rows"]:
            if row["num_draft"] != 0:
                ways.setdefault(row["proposer"], []).append(row)
        _speeds(axes, ways)
        settings = f"temp {table['temp']:g}, {table['batch_size']} at a time"
        axes.set_title(f"{table['task']}, {settings}", fontsize=10)
    figure.savefig(file, dpi=130)


def draw_deltas(rows: Sequence[dict], best: dict | None, title: str, file: Path) -> None:
    """Draws speed against the number of proposals, and quality against delta."""
    figure, (left, right) = _figure(title, 2)
    deltas = sorted({row["delta"] for row in rows})
    grid = {d: [row for row in rows if row["delta"] == d] for d in deltas}
    if best:
        left.plot(_x(best), best["speed_up"].value, "o", color="C3", markersize=16,
                  fillstyle="none", label="recommended")  # fmt: skip
    _speeds(left, {f"δ = {delta:g}": line for delta, line in grid.items()})
    for name in ("exact_match", "chrf", "exact_match_lossless", "chrf_lossless"):
        if all(row[name] is not None for row in rows):
            means = [sum(row[name] for row in line) / len(line) for line in grid.values()]
            label = name.replace("_lossless", ", δ = 0").replace("_", " ").replace("chrf", "chrF")
            right.plot(range(len(deltas)), means, "o-", label=label, markersize=4)
    # Evenly spaced, because most of the effect lies close to 1.
    right.set_xticks(range(len(deltas)), [f"{delta:g}" for delta in deltas])
    right.set(xlabel="leniency δ (--delta)", ylabel="points of 100, mean over γ")
    _legend(right)
    right.grid(color="0.9", linewidth=0.6)
    figure.savefig(file, dpi=130)


def _figure(title: str, panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    lines = [textwrap.fill(line, LETTERS_A_PANEL * panels) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=8, color=GRAY)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _legend(axes: Any) -> None:
    # Below the axes, where it hides no point.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False, fontsize=8, ncols=3)


def _speeds(axes: Any, lines: Lines) -> None:
    """Draws each line with the ranges of its repeats."""
    stars = []
    for i, (label, rows) in enumerate(lines.items()):
        fixed = sorted((row for row in rows if row["num_draft"] != AUTO), key=_x)
        _with_ranges(axes, fixed, "o-", color=f"C{i}", label=label, markersize=4)
        if fixed:
            axes.plot([0, _x(fixed[0])], [1, fixed[0]["speed_up"].value], color=f"C{i}")
        stars += [(row, f"C{i}") for row in rows if row["num_draft"] == AUTO]
    for row, color in stars:
        _with_ranges(axes, [row], "*", color=color, markersize=14, markeredgecolor="k")
    if stars:
        axes.plot([], [], "*", color="w", markersize=12, markeredgecolor="k", label=AUTO)
    axes.axhline(1, color=GRAY, linewidth=0.8)
    axes.set(xlabel="proposals a step, γ", ylabel="relative to regular decoding")
    _legend(axes)
    axes.grid(color="0.9", linewidth=0.6)


def _with_ranges(axes: Any, rows: Sequence[dict], form: str, **style: Any) -> None:
    speeds = [row["speed_up"] for row in rows]
    below = [speed.value - speed.low for speed in speeds]
    above = [speed.high - speed.value for speed in speeds]
    values = [speed.value for speed in speeds]
    axes.errorbar([*map(_x, rows)], values, [below, above], fmt=form, capsize=3, **style)


def _x(row: dict) -> float:
    """The number of proposals; their mean in a step for `auto`."""
    steps = row["steps_by_length"]
    if row["num_draft"] != AUTO:
        return row["num_draft"]
    return sum(n * count for n, count in enumerate(steps)) / max(sum(steps), 1)
