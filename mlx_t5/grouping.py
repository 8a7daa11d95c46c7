"""What shares a forward pass: items of like length, and half of them where memory is short."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

# Source positions, padding included, that a pass of the encoder takes at most, if it is more than
# one prompt. Larger passes were no faster, and the larger, the more of them is padding.
PASS_POSITIONS = 256

Item = TypeVar("Item")
Value = TypeVar("Value")


def by_length(
    lengths: Sequence[int], batch_size: int, most_tokens: float = math.inf
) -> Iterator[list[int]]:
    """Cuts items into batches of like length, the longest first.

    Args:
        lengths: of the items, in tokens.
        batch_size: items of a batch at most.
        most_tokens: of a batch, padding included, if it has more than one item.

    Yields:
        Indices of items.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, int(min(batch_size, most_tokens // max(lengths[order[0]], 1))))
        yield order[:size]
        order = order[size:]


def in_halves(
    work: Callable[[Sequence[Item]], Sequence[Value]],
    items: Sequence[Item],
    refuse: Callable[[Item, str], Value],
) -> Iterator[Value]:
    """Works on items together, or on halves of them where memory does not suffice for all.

    Args:
        work: makes a value of each item; raises RuntimeError or MemoryError without memory, as MLX
            does.
        items: at least one.
        refuse: makes a value of an item that does not fit even alone, and of the error's text.

    Yields:
        The value of each item; what is not asked for is not begun.
    """
    try:
        yield from work(items)
        return
    except (RuntimeError, MemoryError) as error:
        reason = str(error)
    # Out here, what the failed attempt held has been let go.
    if len(items) == 1:
        yield refuse(items[0], reason)
        return
    half = (len(items) + 1) // 2
    yield from in_halves(work, items[:half], refuse)
    yield from in_halves(work, items[half:], refuse)
