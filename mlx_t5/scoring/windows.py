"""Batches items that need one forward pass each, such as texts to score or to embed.

Rows of a batch are padded to the longest row. So items are read in windows of several batches, and
a window's items are grouped by length. Only one window is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mlx_t5.errors import UserError

BATCHES_A_WINDOW = 16

Item = TypeVar("Item")
Value = TypeVar("Value")
Part = list[tuple[int, Value | UserError]]  # indices of items, and their results


def in_order(
    items: Iterable[Any],
    read: Callable[[Any], Item],
    batch_size: int,
    parts: Callable[[Sequence[Item]], Iterator[Part]],
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[Value | Exception]:
    """Yields the result of each item in order.

    The result of an item is what `parts` computes of `read(item)`, batch by batch; or a `UserError`
    that `read` raises; or an exception in place of the item. Items are read lazily; a window ends
    before an item for which `ready` returns False.
    """
    for window in windows(items, BATCHES_A_WINDOW * batch_size, ready):
        results, valid = list[Any](window), dict[int, Item]()
        for i, item in enumerate(window):
            try:
                if not isinstance(item, Exception):
                    valid[i] = read(item)
            except UserError as error:
                results[i] = error
        indices = list(valid)
        for part in parts(list(valid.values())):
            for i, value in part:
                results[indices[i]] = value
        yield from results


def windows(items: Iterable[Item], size: int, ready: Callable[[], bool]) -> Iterator[list[Item]]:
    window: list[Item] = []
    for item in items:
        window.append(item)
        if len(window) == size or not ready():
            yield window
            window = []
    if window:
        yield window


class NotFinite(UserError):
    """The model's output for this item is NaN or infinite; the item itself is valid."""


def no_memory(what: str, reason: str) -> UserError:
    return UserError(f"no memory for {what} ({reason}); shorten it")
