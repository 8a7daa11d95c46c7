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

from mlx_t5.backend.device_memory import free
from mlx_t5.engine.looped_pieces import parts_to_decode
from mlx_t5.engine.memory import longest_text
from mlx_t5.engine.reuse import AnswerStore
from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError, log
from mlx_t5.network.encoding import PASS_POSITIONS, in_halves

if TYPE_CHECKING:
    from mlx_t5.engine.batch import Batch

PROMPTS_A_ROW = 8  # maximum number of prompts held for each row in flight
# Maximum number of source tokens, padding included, that join between two steps; a single prompt
# may be longer. Rows in flight wait while the sources are encoded, as they do for one long prompt.
MAX_JOINING_TOKENS = 1024


class Scheduler:
    """Decides which rows an engine decodes: of the submitted rows, at most `size` at a time.

    If memory does not suffice for a row in addition to the rows in flight, the row waits until one
    of these has left. All later rows wait too: otherwise short prompts could delay a long one
    forever. A row fails only if memory does not suffice for it alone.

    Attributes:
        waiting: the rows that are not in the engine yet, the oldest first. Rows that wait for the
            text of an equal row are in `answers`.
        all_submitted: whether no more rows will come.
        step_seconds: duration of the engine's last step.
    """

    def __init__(
        self, engine: Batch, size: int, answers: AnswerStore | None = None, bulk: bool = False
    ) -> None:
        """Starts without rows.

        Args:
            engine: an empty batch.
            size: maximum number of rows in the batch.
            answers: where equal rows find each other's texts; None decodes every row.
            bulk: whether only the total time matters. Then rows take all free places at once, and
                later rows may be encoded ahead; else `MAX_JOINING_TOKENS` limits how many join.
        """
        self.engine, self.size, self.bulk = engine, size, bulk
        self.answers = answers
        self.waiting = list[Row]()
        self.all_submitted, self.step_seconds = False, 0.0
        self._space, self._lowered = free(), False
        self._full_at = size  # rows in flight when memory last ran out; with fewer, try again

    def submit(self, row: Row) -> None:
        """Adds a row, unless it is finished or its text is known, which finishes it at once."""
        if row.finish_reason is not None:
            return
        if self.answers is None or self.answers.add(row):
            self.waiting.append(row)

    def step(self) -> list[Row]:
        """Admits waiting rows and advances all rows in flight.

        Returns:
            The rows that were advanced, and rows that were finished without decoding: because they
            do not fit into memory even alone, or by the text of an equal row.
        """
        refused = self._admit()
        advanced, started = self.engine.rows, self.engine.clock()
        if advanced:
            self.engine.step()
        self.step_seconds = self.engine.clock() - started
        done = [*refused, *advanced]
        if self.answers is not None:
            reused, again = self.answers.update()
            self.waiting[:0] = again
            done += reused
        return done

    def remove(self, rows: Iterable[Row]) -> None:
        """Removes rows, wherever they are; an equal row may be decoded in the place of each."""
        gone = set(rows)
        self.engine.filter([i for i, row in enumerate(self.engine.rows) if row not in gone])
        remaining = [row for row in self.waiting if row not in gone]
        if len(remaining) < len(self.waiting):
            self._full_at = self.size  # one for which there was no memory may have gone
        again = [] if self.answers is None else self.answers.remove(gone)
        self.waiting = [*again, *remaining]

    def _admit(self) -> list[Row]:
        """Inserts waiting rows if memory suffices; returns rows that do not fit even alone."""
        running = len(self.engine.rows)
        if not self.waiting or running >= self._full_at:
            return []
        everyone = self.waiting
        joining, ahead = self._next(self.size - running)
        for row in joining:
            self._lower_max_tokens(row)
        # Before inserting: a row that breaks the engine is not tried again.
        taken = set(joining)
        self.waiting = [row for row in everyone if row not in taken]
        self._full_at = self.size
        if ahead:
            with suppress(RuntimeError, MemoryError):  # MLX raises these when it cannot allocate
                self.engine.insert(joining, ahead)
                return []
        all_fit = all(in_halves(self._insert, joining, self._refuse))
        refused = [row for row in joining if row.error]
        if not all_fit:
            done = {*self.engine.rows[running:], *refused}
            self.waiting = [row for row in everyone if row not in done]
            self._full_at = len(self.engine.rows)
        return refused

    def _lower_max_tokens(self, row: Row) -> None:
        """Lowers max_tokens to what memory allows; the first time, logs it."""
        engine, wanted = self.engine, row.settings.max_tokens
        most = longest_text(engine.models, wanted, self.size, engine.beams, self._space)
        if most < wanted:
            row.settings = replace(row.settings, max_tokens=most)
            if not self._lowered:
                log(f"max_tokens is lowered from {wanted} to {most}, for which there is memory")
            self._lowered = True

    def _next(self, count: int) -> tuple[list[Row], list[Row]]:
        """Returns up to `count` rows to join, and the rows to encode ahead with them."""
        # Long sources have long texts: started last, they would decode alone.
        if self.all_submitted:
            order = sorted(self.waiting, key=lambda row: -len(row.ids))
        else:  # the oldest row, then the rows nearest to it in length
            oldest = len(self.waiting[0].ids)
            order = sorted(self.waiting, key=lambda row: abs(len(row.ids) - oldest))
        joining, later = order[:count], order[count:]
        if not self.bulk:
            first, others = joining[:1], joining[1:]
            return [*first, *fitting(first, others, MAX_JOINING_TOKENS)] if others else first, []
        new, later = ([row for row in some if row.states is None] for some in (joining, later))
        return joining, fitting(new, later, PASS_POSITIONS) if new and later else []

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
    prompts: Iterable[Iterable[Row]],
    batch_size: int,
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[Row]:
    """Decodes the rows of prompts, at most `batch_size` at a time; yields them in order.

    Prompts and their rows are read lazily. While rows decode, the next prompt is read only if
    `ready` returns True.
    """
    following, rows = iter(prompts), iter(tuple[Row, ...]())
    answers = AnswerStore(engine.target.config.eos_token_ids)
    scheduler = Scheduler(engine, batch_size, answers, bulk=True)
    submitted: deque[Row] = deque()  # and not yielded
    while True:
        while len(submitted) < PROMPTS_A_ROW * batch_size:
            row = next(rows, None)
            if row is None:
                if submitted and not ready():
                    break
                of_prompt = next(following, None)
                if of_prompt is None:
                    scheduler.all_submitted = True
                    break
                rows = iter(of_prompt)
                continue
            submitted.append(row)
            scheduler.submit(row)
        if not submitted:
            return
        scheduler.step()
        while submitted and submitted[0].finish_reason is not None:
            row = submitted.popleft()
            parts = parts_to_decode(row) if row.finish_reason == "repetition" else []
            if parts:
                submitted.extendleft([row, *reversed(parts)])
                for part in parts:
                    scheduler.submit(part)
            elif not row.whole:
                yield row


def follow(engine: Batch, row: Row) -> Iterator[None]:
    """Decodes one row with an empty engine, and yields after each step; raises its error."""
    scheduler = Scheduler(engine, 1)
    scheduler.submit(row)
    while row.finish_reason is None:
        scheduler.step()
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
