"""Work of one pass an item, as scores and embeddings are: batches of like length, order kept.

Rows of a batch are padded to the longest among them. So items are drawn in windows, each window is
cut into batches by length, and the results are given back in the order of the items. Only a window
is in hand at a time, so memory does not grow with the number of items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mlx_t5.errors import UserError

BATCHES_A_WINDOW = 16
DEFAULT_BATCH_SIZE = 8  # items of a pass where the caller names none

Item = TypeVar("Item")
Value = TypeVar("Value")
Part = list[tuple[int, Value | UserError]]  # places of items, and what became of them


def in_order(
    items: Iterable[Item | Exception],
    batch_size: int,
    parts: Callable[[Sequence[Item]], Iterator[Part]],
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[Value | Exception]:
    """What becomes of each item, in their order.

    Args:
        items: drawn as they are needed; an exception in the place of one is given back as it is.
        batch_size: items of a batch at most.
        parts: works on a window of items, batch by batch.
        ready: whether the next item can be drawn without waiting for it; if not, a window that has
            items does not wait.
    """
    for window in windows(items, BATCHES_A_WINDOW * batch_size, ready):
        good: dict[int, Item] = {}
        done: dict[int, Value | Exception] = {}
        for i, item in enumerate(window):
            if isinstance(item, Exception):
                done[i] = item
            else:
                good[i] = item
        places = list(good)
        for part in parts(list(good.values())):
            done |= {places[i]: value for i, value in part}
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


def by_length(
    lengths: Sequence[int], batch_size: int, most_tokens: float = math.inf
) -> Iterator[list[int]]:
    """Cuts items into batches of like length, the longest first.

    Args:
        lengths: of the items, in tokens.
        batch_size: items of a batch at most.
        most_tokens: of a batch, padding included, if it has more than one item.

    Yields:
        Places of items.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, int(min(batch_size, most_tokens // max(lengths[order[0]], 1))))
        yield order[:size]
        order = order[size:]


def attempt(
    work: Callable[[Sequence[Item]], Sequence[Value]], items: Sequence[Item], what: str
) -> list[Value | UserError]:
    """Works on a batch, or on halves of it where memory does not suffice for the whole.

    Args:
        work: makes a value of each item; raises RuntimeError or MemoryError without memory, as MLX
            does.
        items: of the batch.
        what: names an item in the error of one that does not fit even alone.
    """
    try:
        return list(work(items))
    except (RuntimeError, MemoryError) as error:
        reason = str(error)
    # Out here, what the failed attempt held has been let go.
    if len(items) == 1:
        return [UserError(f"no memory for {what} ({reason}); shorten it")]
    half = (len(items) + 1) // 2
    return attempt(work, items[:half], what) + attempt(work, items[half:], what)


def each_read(items: Iterable[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    """What is read of each item; an error where one cannot be used."""
    for item in items:
        if not isinstance(item, Exception):
            try:
                item = read(item)
            except UserError as error:
                item = error
        yield item
