"""Continuous batching: chooses which waiting prompts replace finished ones.

Rows of a batch are padded to its longest source, so prompts join in groups of similar length. If
only the total time matters, later prompts are encoded ahead in the same pass, as a pass over many
positions takes less time than several passes over few. Only a window of prompts is held at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_t5.backend.machine import free
from mlx_t5.engine.memory import longest_text
from mlx_t5.engine.reuse import AnswerStore
from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError, log
from mlx_t5.grouping import PASS_POSITIONS, in_halves

if TYPE_CHECKING:
    from mlx_t5.engine.batch import Batch

PROMPTS_A_ROW = 8  # maximum number of prompts held for each row in flight
# Maximum number of source tokens, padding included, that join between two steps; a single prompt
# may be longer. Rows in flight wait while the sources are encoded, as they do for one long prompt.
MAX_JOINING_TOKENS = 1024


class Queue:
    """Rows that wait for a place in an engine's batch, and for memory.

    If memory does not suffice for a row in addition to the rows in flight, the row waits until one
    of these has left. All later rows wait too: otherwise short prompts could delay a long one
    forever. A row fails only if memory does not suffice for it alone.
    """

    def __init__(
        self, engine: Batch, size: int, waiting: Sequence[Row] = (), bulk: bool = False
    ) -> None:
        self.engine, self.size, self.bulk = engine, size, bulk
        # In bulk only the total time matters: rows take all free places at once, and later rows may
        # be encoded ahead. Otherwise `MAX_JOINING_TOKENS` limits the rows that join.
        self.waiting, self.last = list(waiting), False  # the oldest first; no more will come
        self._space, self._lowered = free(), False
        self._room = size  # rows in flight when memory last ran out; with fewer, try again

    def admit(self) -> list[Row]:
        """Inserts waiting rows for which there is room; returns rows that do not fit even alone."""
        running = len(self.engine.rows)
        if not self.waiting or running >= min(self.size, self._room):
            return []
        everyone, (joining, ahead) = self.waiting, self._next(self.size - running)
        for row in joining:
            self._lower_max_tokens(row)
        self.remove(joining)  # before inserting: a row that breaks the engine is not tried again
        if ahead:
            with suppress(RuntimeError, MemoryError):  # MLX raises these when it cannot allocate
                self.engine.insert(joining, ahead)
                return []
        all_fit = all(in_halves(self._insert, joining, self._refuse))
        failed = [row for row in joining if row.error]
        if not all_fit:
            done = {*self.engine.rows[running:], *failed}
            self.waiting = [row for row in everyone if row not in done]
            self._room = len(self.engine.rows)
        return failed

    def _lower_max_tokens(self, row: Row) -> None:
        """Lowers max_tokens to what memory allows; the first time, a note says so."""
        engine, wanted = self.engine, row.settings.max_tokens
        most = longest_text(engine.models, wanted, self.size, engine.beams, self._space)
        if most < wanted:
            row.settings = replace(row.settings, max_tokens=most)
            if not self._lowered:
                log(f"max_tokens is lowered from {wanted} to {most}, for which there is memory")
            self._lowered = True

    def remove(self, rows: Iterable[Row]) -> None:
        """Removes rows from the queue, so that no later row waits for them."""
        gone = set(rows)
        remaining = [row for row in self.waiting if row not in gone]
        if len(remaining) < len(self.waiting):
            self.waiting, self._room = remaining, self.size

    def _next(self, count: int) -> tuple[list[Row], list[Row]]:
        """Returns up to `count` rows to join, and the rows to encode ahead with them."""
        if self.last:  # long sources have long texts: started last, they would decode alone
            order = sorted(self.waiting, key=lambda row: -len(row.ids))
        else:  # the oldest row, then the rows nearest to it in length
            oldest = len(self.waiting[0].ids)
            order = sorted(self.waiting, key=lambda row: abs(len(row.ids) - oldest))
        joining, later = order[:count], order[count:]
        if not self.bulk:
            return [*joining[:1], *fitting(joining[:1], joining[1:], MAX_JOINING_TOKENS)], []
        new, later = ([row for row in some if row.states is None] for some in (joining, later))
        return joining, fitting(new, later, PASS_POSITIONS) if new else []

    def _insert(self, rows: Sequence[Row]) -> list[bool]:
        self.engine.insert(rows)
        return [True] * len(rows)

    def _refuse(self, row: Row, reason: str) -> bool:
        if self.engine.rows:
            return False  # it can wait for others to leave
        cure = "shorten it or lower max_tokens"
        row.fail(f"no memory for a prompt of {len(row.ids)} tokens ({reason}); {cure}")
        return True


def decode_rows(
    engine: Batch,
    rows: Iterable[Row],
    batch_size: int,
    ready: Callable[[int], bool] = lambda drawn: True,
) -> Iterator[Row]:
    """Decodes rows, read lazily, at most `batch_size` at a time; yields them in order.

    While rows decode, the next one is read only if ready(number of rows read) returns True.
    """
    rows, total = iter(rows), 0
    answers = AnswerStore(engine.target.config.eos_token_ids)
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
            if row.finish_reason is None and answers.claim(row):  # its prompt is usable and new
                queue.waiting.append(row)
        if not in_hand:
            return
        queue.admit()
        if engine.rows:
            engine.step()
        queue.waiting[:0] = answers.settle()[1]
        while in_hand and in_hand[0].finish_reason is not None:
            yield in_hand.popleft()


def follow(engine: Batch, row: Row) -> Iterator[None]:
    """Decodes one row with an empty engine, and yields after each step; raises its error."""
    Queue(engine, 1, [row]).admit()
    while row.finish_reason is None:
        engine.step()
        if not row.error:
            yield
    if row.error:
        raise UserError(row.error)


def fitting(rows: Sequence[Row], candidates: Sequence[Row], most: int) -> list[Row]:
    """The first rows of `candidates` to encode in one pass with `rows`: `most` tokens, padded."""
    # Equal sources count once, as they are encoded once. A single one may be longer.
    sources, longest = {tuple(row.ids) for row in rows}, max(len(row.ids) for row in rows)
    for i, row in enumerate(candidates):
        sources.add(tuple(row.ids))
        longest = max(longest, len(row.ids))
        if len(sources) > 1 and len(sources) * longest > most:
            return list(candidates[:i])
    return list(candidates)
