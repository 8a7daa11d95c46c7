"""What takes one forward pass an item, as scores and vectors do: batches of like length, in order.

Rows of a batch are padded to the longest among them. So items are drawn in windows, each window is
cut into batches by length, and the results are given back in the order of the items. Only a window
is in hand at a time, so memory does not grow with the number of items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mlx_t5.errors import UserError

BATCHES_A_WINDOW = 16

Item = TypeVar("Item")
Value = TypeVar("Value")
Part = list[tuple[int, Value | UserError]]  # indices of items, and what became of them


def in_order(
    given: Iterable[Item | Exception],
    batch_size: int,
    parts: Callable[[Sequence[Item]], Iterator[Part]],
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[Value | Exception]:
    """What becomes of each item, in their order.

    Args:
        given: items, drawn as they are needed; an exception in the place of one is given back.
        batch_size: items of a batch at most.
        parts: works on a window of items, batch by batch.
        ready: whether the next item can be drawn without waiting for it; if not, a window that has
            items does not wait.
    """
    for window in windows(given, BATCHES_A_WINDOW * batch_size, ready):
        done: dict[int, Any] = {i: x for i, x in enumerate(window) if isinstance(x, Exception)}
        items = {i: x for i, x in enumerate(window) if not isinstance(x, Exception)}
        indices = list(items)
        for part in parts(list(items.values())):
            done |= {indices[i]: value for i, value in part}
        yield from (done[i] for i in range(len(window)))


def windows(
    items: Iterable[Item], size: int, ready: Callable[[], bool] = lambda: True
) -> Iterator[list[Item]]:
    """Cuts items into lists of at most `size`, shorter ones where the next is not ready."""
    window: list[Item] = []
    for item in items:
        window.append(item)
        if len(window) == size or not ready():
            yield window
            window = []
    if window:
        yield window


class NotFinite(UserError):
    """The model computes no numbers for this item; it is not the item's fault."""


def no_memory(what: str, reason: str) -> UserError:
    """What becomes of an item that a pass has no memory for."""
    return UserError(f"no memory for {what} ({reason}); shorten it")


def each_read(items: Iterable[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    """What is read of each item; an error where one cannot be used."""
    for item in items:
        if not isinstance(item, Exception):
            try:
                item = read(item)
            except UserError as error:
                item = error
        yield item
