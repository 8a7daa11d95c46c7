"""Continuous batching: which waiting prompts take the place of finished ones.

Rows of a batch are padded to the longest source among them, so prompts join in groups of like
length. Results leave in the order in which the prompts came, and only a window of prompts is in
hand at a time, so memory does not grow with their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from mlx_t5.requests import Row

PROMPTS_A_ROW = 8  # prompts in hand for each row in flight
# Source tokens, padding included, that join between two steps at most, if it is more than one
# prompt: rows in flight stand still while they are encoded, about as long as one long prompt takes.
MAX_JOINING_TOKENS = 1024


class Engine(Protocol):
    """What batching needs of `decoder.Engine`."""

    rows: list[Row]

    def insert(self, rows: Sequence[Row]) -> None:
        """Adds rows to the batch."""

    def step(self) -> None:
        """Advances all of them; those that finish leave the batch."""


class Queue:
    """Rows that wait for a place in an engine's batch, and for memory.

    A row that memory does not suffice for beside others waits until one of them has left, and so
    do all that came after it: otherwise short prompts could keep a long one waiting for good. It
    fails only if it does not fit alone.

    Attributes:
        waiting: the rows, the oldest first.
    """

    def __init__(self, engine: Engine, size: int, waiting: Sequence[Row] = ()) -> None:
        """Lets at most `size` rows into the engine's batch."""
        self.engine, self.size = engine, size
        self.waiting = list(waiting)
        self._room = size  # rows beside which one was refused; tried again when there are fewer

    def admit(self) -> list[Row]:
        """Lets as many rows join as there are places and memory for.

        Returns:
            Those that cannot be decoded at all, finished by `error`.
        """
        running = len(self.engine.rows)
        if not self.waiting or running >= min(self.size, self._room):
            return []
        everyone, joining = self.waiting, next_group(self.waiting, self.size - running)
        self.remove(joining)  # at once: one on which the engine breaks must not be tried again
        all_fit = self._insert(joining)
        failed = [row for row in joining if row.error]
        if not all_fit:
            done = set(map(id, [*self.engine.rows[running:], *failed]))
            self.waiting = [row for row in everyone if id(row) not in done]
            self._room = len(self.engine.rows)
        return failed

    def remove(self, rows: Iterable[Row]) -> None:
        """Takes rows out of the batch; nobody has to wait on their account any longer."""
        gone = set(map(id, rows))
        left = [row for row in self.waiting if id(row) not in gone]
        if len(left) < len(self.waiting):
            self.waiting, self._room = left, self.size

    def _insert(self, rows: Sequence[Row]) -> bool:
        """Inserts rows, at first all, then halves of them; False once one has to wait."""
        try:
            self.engine.insert(rows)
            return True
        except (RuntimeError, MemoryError) as error:  # what MLX raises when it cannot allocate
            reason = str(error)
        # Out here, what the failed attempt held has been let go.
        if len(rows) > 1:
            half = (len(rows) + 1) // 2
            return self._insert(rows[:half]) and self._insert(rows[half:])
        if self.engine.rows:
            return False
        tokens, cure = len(rows[0].ids), "shorten it or lower max_tokens"
        rows[0].fail(f"no memory for a prompt of {tokens} tokens ({reason}); {cure}")
        return True


def run(
    engine: Engine,
    rows: Iterable[Row],
    batch_size: int,
    ready: Callable[[int], bool] = lambda drawn: True,
) -> Iterator[Row]:
    """Decodes rows, at most `batch_size` at a time.

    Args:
        engine: an engine without rows.
        rows: what to decode; drawn from only as room is made.
        batch_size: rows in flight at most.
        ready: told how many rows have been drawn, says whether the next can be drawn without
            waiting for it. It is waited for only when no row is in hand.

    Yields:
        Every row, finished, in the order of `rows`, as soon as all before it are finished. A row
        that the device has no memory for, even alone, is finished by `error`.
    """
    rows, total = iter(rows), 0
    in_hand: deque[Row] = deque()
    queue = Queue(engine, batch_size)
    while True:
        while len(in_hand) < PROMPTS_A_ROW * batch_size and (not in_hand or ready(total)):
            row = next(rows, None)
            if row is None:
                break
            total += 1
            in_hand.append(row)
            if row.finish_reason is None:  # bad ones are done
                queue.waiting.append(row)
        if not in_hand:
            return
        queue.admit()
        if engine.rows:
            engine.step()
        while in_hand and in_hand[0].finish_reason is not None:
            yield in_hand.popleft()


def next_group(waiting: Sequence[Row], count: int) -> list[Row]:
    """Returns up to `count` rows to join: the oldest, and those nearest to it in length.

    Together their sources have at most `MAX_JOINING_TOKENS` tokens; equal sources are encoded once
    and count once.
    """
    first = len(waiting[0].ids)
    near = sorted(range(1, len(waiting)), key=lambda i: abs(len(waiting[i].ids) - first))
    chosen, sources, longest = [waiting[0]], {tuple(waiting[0].ids)}, first
    for row in (waiting[i] for i in near[: count - 1]):
        sources.add(tuple(row.ids))
        longest = max(longest, len(row.ids))
        if len(sources) > 1 and len(sources) * longest > MAX_JOINING_TOKENS:
            break
        chosen.append(row)
    return chosen
