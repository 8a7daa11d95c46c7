"""Continuous batching: which waiting prompts take the place of finished ones.

Rows of a batch are padded to the longest source among them, so prompts join in groups of like
length. Results leave in the order in which the prompts came, and only a window of prompts is in
hand at a time, so memory does not grow with their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from results import Row

if TYPE_CHECKING:
    from engine import Engine

WINDOW = 8  # prompts in hand for each row in flight


def run(engine: Engine, rows: Iterable[Row], batch_size: int) -> Iterator[Row]:
    """Decodes rows, at most `batch_size` at a time.

    Args:
        engine: an engine without rows.
        rows: what to decode; drawn from only as room is made.
        batch_size: rows in flight at most.

    Yields:
        Every row, finished, in the order of `rows`, as soon as all before it are finished. A row
        that the device has no memory for is finished by `error`.
    """
    rows = iter(rows)
    in_hand: deque[Row] = deque()
    waiting: list[Row] = []
    while True:
        drawn = list(islice(rows, WINDOW * batch_size - len(in_hand)))
        in_hand += drawn
        waiting += [row for row in drawn if row.finish_reason is None]  # bad ones are finished
        if not in_hand:
            return
        free = batch_size - len(engine.rows)
        if free and waiting:
            joining, waiting = choose(waiting, free)
            insert(engine, joining)
        if engine.rows:
            engine.step()
        while in_hand and in_hand[0].finish_reason is not None:
            yield in_hand.popleft()


def choose(waiting: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Splits waiting rows into those that join and those that go on waiting.

    Up to `count` rows join: the one that has waited longest, and those nearest to it in length.
    """
    first = waiting[0]
    near = sorted(range(1, len(waiting)), key=lambda i: abs(len(waiting[i].ids) - len(first.ids)))
    joining = [0, *near[: count - 1]]
    rest = sorted(near[count - 1 :])
    return [waiting[i] for i in joining], [waiting[i] for i in rest]


def insert(engine: Engine, rows: list[Row]) -> None:
    """Adds rows to the batch; where memory does not suffice for all, for as many as it does."""
    try:
        engine.insert(rows)
    except (RuntimeError, MemoryError) as error:  # what MLX raises when it cannot allocate
        if len(rows) == 1:
            count = len(rows[0].ids)
            cure = "shorten it or lower max_tokens"
            rows[0].fail(f"no memory for a prompt of {count} tokens ({error}); {cure}")
            return
        for row in rows:
            insert(engine, [row])
