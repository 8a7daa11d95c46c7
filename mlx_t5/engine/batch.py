"""A batch of rows in flight: how rows join it and leave it.

A row's source is encoded when the row joins, or earlier. While the row is in the batch, the batch
holds its target cache, and the draft and the drafter their own state for it. Rows keep their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.proposals import Drafter
from mlx_t5.engine.memory import require_for
from mlx_t5.engine.rows import Row
from mlx_t5.network.encoding import encoder_states, make_cache
from mlx_t5.network.interface import Target
from mlx_t5.text.prompts import HIDDEN


class Batch:
    """The rows in flight, with the target's cache and the settings for all rows."""

    beams = 1  # sequences that the target continues for each row
    gamma = 0  # the largest number of proposals of a row in the last step
    draft: DraftModel | None = None
    copy: Drafter | None = None

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter) -> None:
        self.target, self.clock = target, clock
        self.models: list[Any] = [target]  # those that need memory for each row
        self.cache: Any = None  # the target's; None without rows
        self.rows: list[Row] = []

    def insert(self, rows: Sequence[Row], ahead: Sequence[Row] = ()) -> None:
        """Encodes the sources of new rows and adds the rows to the batch.

        Args:
            rows: the new rows; rows that were encoded ahead are not encoded again.
            ahead: rows that join later, to be encoded in the same passes.

        Raises:
            RuntimeError: the device does not have enough memory; the batch is unchanged.
        """
        started = self.clock()
        sources = [row.ids for row in rows]
        require_for(self.models, rows, self.rows, ahead, self.beams)
        new = [row for row in (*rows, *ahead) if row.states is None]
        states = encoder_states(self.target, [row.ids for row in new])
        by_row = dict(zip(new, states, strict=True))
        encoded = [by_row.get(r, r.states) for r in rows]
        cache = make_cache(self.target, sources, encoded, self.beams)
        mx.async_eval(cache.state, states)
        mx.synchronize()  # waiting for the arrays alone may miss a failed pass
        if self.draft:
            self.draft.insert(sources, encoded)
        if self.copy:
            visible = [[token for token in ids if token != HIDDEN] for ids in sources]
            self.copy.insert(visible, [row.prediction for row in rows])
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.extend(cache)
        seconds = self.clock() - started
        for row in (*rows, *ahead):
            row.stats.encode_seconds += seconds
            row.states = by_row.get(row, row.states)
        for row in rows:
            row.tokens = [self.target.config.decoder_start_token_id]
            row.stats.prompt_tokens = len(row.ids)
            row.states = None
        self.rows = [*self.rows, *rows]
        self._collect()

    def step(self) -> None:
        """Advances all rows; finished rows leave the batch."""
        raise NotImplementedError

    def forget(self) -> None:
        """Discards what was learned from sampled rows; see `Engine`."""

    def drop_finished(self) -> None:
        if not any(row.finish_reason for row in self.rows):
            return
        try:
            # Metal may return zeros for a failed pass, and report the error only here. Then every
            # row has tokens from that pass.
            mx.synchronize()
        except (RuntimeError, MemoryError) as error:
            for row in self.rows:
                row.fail(f"the last pass failed ({error}); decode fewer texts at a time")
        self.filter([i for i, row in enumerate(self.rows) if row.finish_reason is None])

    def filter(self, rows: Sequence[int]) -> None:
        """Keeps only the rows with these ascending indices."""
        if list(rows) == list(range(len(self.rows))):
            return
        remaining = [self.rows[row] for row in rows]
        if self.draft:
            self.draft.filter(rows)
        if self.copy:
            self.copy.filter(rows)
        if remaining:
            self.cache.filter(rows)
            # Otherwise one long prompt would pad all later rows of a batch that never empties.
            longest = max(len(row.tokens) for row in remaining)
            self.cache.trim(max(len(row.ids) for row in remaining), longest - 1)
        else:
            self.cache = None
        self.rows = remaining
        if remaining:
            self._collect()

    def _collect(self) -> None:
        """Collects from all rows the settings that a step needs; called when the rows change."""
        raise NotImplementedError
