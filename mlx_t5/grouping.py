"""Groups the items of forward passes by length, and halves a group if memory is short."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

# Maximum number of source positions in an encoder pass of several prompts, with padding to the
# longest prompt; rounding up lengths on a GPU (`cache.source_width`) is not counted.
# Larger passes were not faster, and had more padding.
PASS_POSITIONS = 256

Item = TypeVar("Item")
Value = TypeVar("Value")


def by_length(
    lengths: Sequence[int] | Sequence[tuple[int, ...]],
    batch_size: int,
    most_tokens: float = math.inf,
) -> Iterator[list[int]]:
    """Groups items of similar length into batches of indices, the longest items first.

    Args:
        lengths: lengths of the items in tokens; if tuples, the first counts, the next ones order
            items of equal length.
        batch_size: maximum number of items in a batch.
        most_tokens: maximum number of tokens in a batch of several items, padding included.
    """
    keys = [length if isinstance(length, tuple) else (length,) for length in lengths]
    order = sorted(range(len(keys)), key=lambda i: keys[i], reverse=True)
    while order:
        size = max(1, int(min(batch_size, most_tokens // max(keys[order[0]][0], 1))))
        yield order[:size]
        order = order[size:]


def in_halves(
    work: Callable[[Sequence[Item]], Sequence[Value]],
    items: Sequence[Item],
    refuse: Callable[[Item, str], Value],
) -> Iterator[Value]:
    """Computes the values of all items together, or half by half if memory runs out.

    Args:
        work: computes the value of each item; like MLX, it raises RuntimeError or MemoryError if
            memory runs out. It is called only when a value is requested.
        items: the items, at least one.
        refuse: makes the value of an item that does not fit into memory even alone, from the item
            and the error's text.
    """
    try:
        yield from work(items)
        return
    except (RuntimeError, MemoryError) as error:
        reason = str(error)
    # Outside the handler, where the memory of the failed attempt has been freed.
    if len(items) == 1:
        yield refuse(items[0], reason)
        return
    half = (len(items) + 1) // 2
    yield from in_halves(work, items[:half], refuse)
    yield from in_halves(work, items[half:], refuse)
