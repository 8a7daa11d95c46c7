"""The rows in flight: how they join and leave.

A batch is what `decoder.Engine` or `beams.Beams` advances. Sources are encoded when a row joins, or
ahead; then the batch holds the row's cache, and its drafter what it needs for the row. Rows keep
their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx
from mlx_t5.engine.rows import Row
from mlx_t5.network.encoding import encoder_states, prepared
from mlx_t5.network.memory import require_for
from mlx_t5.network.ranks import ranks_of

if TYPE_CHECKING:
    from mlx_t5.drafting.proposals import Choice, Drafter
    from mlx_t5.network.exact import ExactTarget
    from model import T5


class Batch:
    """Rows in flight, with the target's cache and the settings of all of them.

    Attributes:
        rows: those in flight.
        cache: the target's, a `Cache` while there are rows.
        copies: sequences of each row that the target continues.
        ranks: that share the target; all take what rank 0 proposes and decides.
        choices: what each row was proposed in the last step, if anything can be.
    """

    copies = 1

    def __init__(
        self,
        target: T5 | ExactTarget,
        drafter: Drafter | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts an empty batch.

        Args:
            target: the model whose output is wanted, in exact decoding around it what pads.
            drafter: where proposals come from; None for regular decoding.
            clock: seconds, for the statistics.
        """
        self.target, self.drafter, self.clock = target, drafter, clock
        self.ranks = ranks_of(target)
        self.cache: Any = None
        self.choices: list[Choice] = []
        self.rows: list[Row] = []
        self._collect()

    @property
    def committed(self) -> list[list[int]]:
        """The tokens of each row so far, the start token first."""
        return [row.committed for row in self.rows]

    def insert(self, rows: Sequence[Row], ahead: Sequence[Row] = ()) -> None:
        """Encodes the source of new rows and adds them to the batch.

        Args:
            rows: the new ones; those that have been encoded ahead are not encoded again.
            ahead: rows that join later, to be encoded in the same passes.

        Raises:
            RuntimeError: the device has not enough memory; the batch is as it was.
        """
        started = self.clock()
        sources = [row.ids for row in rows]
        models = [self.target, self.drafter.model if self.drafter else None]
        require_for(models, rows, self.rows, ahead, self.copies)
        new = [row for row in (*rows, *ahead) if row.states is None]
        with self.ranks.in_step():
            states = encoder_states(self.target, [row.ids for row in new])
            by_row = {id(row): encoding for row, encoding in zip(new, states, strict=True)}
            encoded = [by_row.get(id(r), r.states) for r in rows]
            cache = prepared(self.target, sources, encoded, self.copies)
            mx.async_eval(cache.state, states)
            mx.synchronize()  # a wait for arrays alone may miss that their pass has failed
        if self.drafter:
            self.drafter.insert(sources, encoded)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.append(cache)
        seconds = self.clock() - started
        for row in (*rows, *ahead):
            row.stats.encode_seconds += seconds
            row.states = by_row.get(id(row), row.states)
        for row in rows:
            row.committed = [self.target.config.decoder_start_token_id]
            row.stats.prompt_tokens = len(row.ids)
            row.states = None
        self.rows = [*self.rows, *rows]
        self._collect()

    def step(self) -> None:
        """Advances all rows; those that finish leave the batch."""
        raise NotImplementedError

    def drop_finished(self) -> None:
        """Drops the finished rows, if the pass that wrote their last tokens has ended well.

        Metal may give zeros for a pass that has failed, and say so at the next use. Then every row
        has tokens of that pass, and fails.
        """
        if any(row.finish_reason for row in self.rows):
            try:
                with self.ranks.in_step():
                    mx.synchronize()
            except RuntimeError as error:
                for row in self.rows:
                    row.fail(f"the last pass failed ({error}); decode fewer texts at a time")
        self.keep([i for i, row in enumerate(self.rows) if row.finish_reason is None])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order; the others leave the batch."""
        if list(rows) == list(range(len(self.rows))):
            return
        remaining = [self.rows[row] for row in rows]
        if self.drafter:
            self.drafter.keep(rows)
        if remaining:
            self.cache.keep(rows)
            # In a batch that never empties, one long prompt would make all rows as wide for good.
            longest = max(len(row.committed) for row in remaining)
            self.cache.trim(max(len(row.ids) for row in remaining), longest - 1)
        else:
            self.cache = None
        self.rows = remaining
        self._collect()

    def _collect(self) -> None:
        """Called when the rows have changed: collects what a step needs of their settings."""
        raise NotImplementedError
