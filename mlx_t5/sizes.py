"""Formats figures and tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Columns = Mapping[str, Callable[[dict], str]]  # of a table: title → how to write a row's figure


def readable(size: float) -> str:
    """Formats bytes in GB, or in MB below 0.1 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def percent(share: float | None) -> str:
    """Formats a share for a table; empty if it is None."""
    return "" if share is None else f"{share:.1%}"


def markdown(columns: Columns, rows: Sequence[dict]) -> str:
    """Returns a Markdown table that is readable in a terminal, too."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[write(row) for write in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
