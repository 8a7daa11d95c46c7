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
    entries: Iterable[Item | Exception],
    batch_size: int,
    parts: Callable[[Sequence[Item]], Iterator[Part]],
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[Value | Exception]:
    """Yields the result of each item in order; an exception in place of an item is its result.

    Items are read lazily; a window ends before an item for which `ready` returns False. `parts`
    computes the results of a window, batch by batch.
    """
    for window in windows(entries, BATCHES_A_WINDOW * batch_size, ready):
        done: dict[int, Any] = {i: x for i, x in enumerate(window) if isinstance(x, Exception)}
        items = {i: x for i, x in enumerate(window) if not isinstance(x, Exception)}
        indices = list(items)
        for part in parts(list(items.values())):
            done |= {indices[i]: value for i, value in part}
        yield from (done[i] for i in range(len(window)))


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


def each_read(items: Iterable[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    """Yields read(item), or the `UserError` it raises; exceptions in `items` are yielded as is."""
    for item in items:
        if not isinstance(item, Exception):
            try:
                item = read(item)
            except UserError as error:
                item = error
        yield item
