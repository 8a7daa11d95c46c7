"""Continuous batching: which waiting prompts take the place of finished ones.

Rows of a batch are padded to the longest source among them, so prompts join in groups of like
length. Where nobody waits for a single one, others are encoded ahead with them, as a pass over few
positions is dear. Results leave in the order in which the prompts came, and only a window of
prompts is in hand at a time, so memory does not grow with their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError
from mlx_t5.grouping import PASS_POSITIONS, in_halves

if TYPE_CHECKING:
    from mlx_t5.engine.batch import Batch

PROMPTS_A_ROW = 8  # prompts in hand for each row in flight
# Source tokens, padding included, that join between two steps at most, if it is more than one
# prompt: rows in flight stand still while they are encoded, about as long as one long prompt takes.
MAX_JOINING_TOKENS = 1024


class Queue:
    """Rows that wait for a place in an engine's batch, and for memory.

    A row that memory does not suffice for beside others waits until one of them has left, and so
    do all that came after it: otherwise short prompts could keep a long one waiting for good. It
    fails only if it does not fit alone.

    Attributes:
        waiting: the rows, the oldest first.
        last: whether none will come after them.
    """

    def __init__(
        self, engine: Batch, size: int, waiting: Sequence[Row] = (), bulk: bool = False
    ) -> None:
        """Lets at most `size` rows into the engine's batch.

        Args:
            engine: with the batch.
            size: rows in it at most.
            waiting: the first rows.
            bulk: nobody waits for a single row, so rows may be encoded ahead, together with those
                that join, and any number may join at once.
        """
        self.engine, self.size, self.bulk = engine, size, bulk
        self.waiting, self.last = list(waiting), False
        self._room = size  # rows beside which one was refused; tried again when there are fewer

    def admit(self) -> list[Row]:
        """Lets as many rows join as there are places and memory for.

        Returns:
            Those that cannot be decoded at all, finished by `error`.
        """
        running = len(self.engine.rows)
        if not self.waiting or running >= min(self.size, self._room):
            return []
        everyone, (joining, ahead) = self.waiting, self._next(self.size - running)
        self.remove(joining)  # at once: one on which the engine breaks must not be tried again
        all_fit = self._insert(joining, ahead)
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

    def _next(self, count: int) -> tuple[list[Row], list[Row]]:
        """Up to `count` rows to join, and those to encode ahead with them."""
        if self.last:  # few are to be left alone at the end, and long sources make long texts
            order = sorted(self.waiting, key=lambda row: -len(row.ids))
        else:  # the oldest, then those nearest to it in length
            oldest = len(self.waiting[0].ids)
            order = sorted(self.waiting, key=lambda row: abs(len(row.ids) - oldest))
        joining, later = order[:count], order[count:]
        if not self.bulk:
            return [*joining[:1], *fitting(joining[:1], joining[1:], MAX_JOINING_TOKENS)], []
        new, later = ([row for row in some if row.states is None] for some in (joining, later))
        return joining, fitting(new, later, PASS_POSITIONS) if new else []

    def _insert(self, rows: Sequence[Row], ahead: Sequence[Row] = ()) -> bool:
        """Inserts rows, at first all, then halves of them; False once one has to wait."""
        if ahead:
            with suppress(RuntimeError, MemoryError):  # what MLX raises when it cannot allocate
                self.engine.insert(rows, ahead)
                return True
        return all(in_halves(self._insert_all, rows, self._refuse))

    def _insert_all(self, rows: Sequence[Row]) -> list[bool]:
        self.engine.insert(rows)
        return [True] * len(rows)

    def _refuse(self, row: Row, reason: str) -> bool:
        """What becomes of a row without memory: False if it waits for others, True if it fails."""
        if self.engine.rows:
            return False
        cure = "shorten it or lower max_tokens"
        row.fail(f"no memory for a prompt of {len(row.ids)} tokens ({reason}); {cure}")
        return True


def decode_rows(
    engine: Batch,
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
    queue = Queue(engine, batch_size, bulk=True)
    while True:
        while len(in_hand) < PROMPTS_A_ROW * batch_size and (not in_hand or ready(total)):
            row = next(rows, None)
            if row is None:
                queue.last = True
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


def follow(engine: Batch, row: Row) -> Iterator[int]:
    """Decodes one row with an engine without rows.

    Yields:
        After each step, how many tokens the row had before it.

    Raises:
        UserError: the row cannot be decoded.
    """
    Queue(engine, 1, [row]).admit()
    while row.finish_reason is None:
        seen = row.decided
        engine.step()
        if not row.error:
            yield seen
    if row.error:
        raise UserError(row.error)


def fitting(rows: Sequence[Row], others: Sequence[Row], most: int) -> list[Row]:
    """Returns those of `others`, from the first on, that can be encoded together with `rows`.

    All their sources, padded, have `most` tokens then; equal ones are encoded once and count once.
    """
    sources, longest = {tuple(row.ids) for row in rows}, max(len(row.ids) for row in rows)
    for i, row in enumerate(others):
        sources.add(tuple(row.ids))
        longest = max(longest, len(row.ids))
        if len(sources) > 1 and len(sources) * longest > most:
            return list(others[:i])
    return list(others)
