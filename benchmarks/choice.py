"""The picture of `compare`: how fast each number of proposals is, and what `auto` made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_t5.settings import AUTO

GREY = "0.4"


def draw(tables: Sequence[dict], title: str, file: Path) -> None:
    """Draws a panel a table, and in it a line for each way of proposing; an image file.

    `auto` is a star at the mean number of proposals of its steps.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(tables), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=8, color=GREY)
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        _panel(axes, table)
    figure.savefig(file, dpi=130)


def _panel(axes: Any, table: dict) -> None:
    ways: dict[str, list[dict]] = {}
    for row in table["rows"]:
        if row["num_draft"] != 0:
            ways.setdefault(row["proposer"], []).append(row)
    for i, (way, rows) in enumerate(ways.items()):
        numbers = [row["num_draft"] for row in rows if row["num_draft"] != AUTO]
        speeds = [row["speed_up"].value for row in rows if row["num_draft"] != AUTO]
        axes.plot([0, *numbers], [1, *speeds], "o-", color=f"C{i}", label=way, markersize=4)
        for row in rows:
            if row["num_draft"] == AUTO:
                axes.plot(_mean(row["steps_by_length"]), row["speed_up"].value, "*",
                          color=f"C{i}", markersize=14, markeredgecolor="k")  # fmt: skip
    axes.plot([], [], "*", color="w", markersize=12, markeredgecolor="k", label="auto")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="proposals a step, γ", ylabel="relative to regular decoding")
    axes.set_title(f"{table['task']}, temp {table['temp']:g}, {table['batch_size']} at a time",
                   fontsize=10)  # fmt: skip
    axes.legend(fontsize=8)
    axes.grid(color="0.9", linewidth=0.6)


def _mean(steps: Sequence[float]) -> float:
    return sum(n * count for n, count in enumerate(steps)) / max(sum(steps), 1)
