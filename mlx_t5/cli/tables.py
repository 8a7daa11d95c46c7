"""Tables in Markdown, which read well in a terminal too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Columns = Mapping[str, Callable[[dict], str]]


def percent(share: float | None) -> str:
    """A share as a table writes it; nothing if it is unknown."""
    return "" if share is None else f"{share:.1%}"


def markdown(columns: Columns, rows: Sequence[dict]) -> str:
    """A Markdown table.

    Args:
        columns: title → how to write a row's figure.
        rows: their figures.
    """
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[write(row) for write in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
