"""Figures as people read them, in tables too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Columns = Mapping[str, Callable[[dict], str]]  # of a table: title → how to write a row's figure


def readable(size: float) -> str:
    """A number of bytes in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def percent(share: float | None) -> str:
    """A share as a table writes it; nothing if it is unknown."""
    return "" if share is None else f"{share:.1%}"


def markdown(columns: Columns, rows: Sequence[dict]) -> str:
    """A Markdown table, which reads well in a terminal too."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[write(row) for write in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
