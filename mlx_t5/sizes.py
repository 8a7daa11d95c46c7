"""Formats figures and tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Columns = Mapping[str, Callable[[dict], str]]  # title → function that writes a figure


def readable(size: float) -> str:
    """Returns a size in bytes as text: in GB, or in MB below 0.1 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def percent(share: float | None) -> str:
    """Returns a share as a percentage for a table; "" if the share is None."""
    return "" if share is None else f"{share:.1%}"


def markdown(columns: Columns, rows: Sequence[dict]) -> str:
    """Returns a Markdown table that is readable in a terminal, too."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[write(row) for write in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
