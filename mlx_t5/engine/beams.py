"""Beam search over the rows in flight: K beams per row, one token per step, and no draft.

The beams of a row share its prompt, so the cache holds the prompt's cross-attention once. The
device finds the best continuations of all beams; then sampling/beam_search.py decides in Python
which of them become beams or finished texts.

Symbols: B rows, K beams per row, C continuations found per row, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.engine.batch import Batch
from mlx_t5.engine.rows import Row
from mlx_t5.model import T5
from mlx_t5.sampling.beam_search import NO_BEAM, BeamSearch, Hypothesis, finalize, largest
from mlx_t5.sampling.processors import History, Processing


class Beams(Batch):
    """A batch of rows with `num_beams` beams each."""

    def __init__(
        self, target: T5, num_beams: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.beams = num_beams
        super().__init__(target, clock)

    def insert(self, rows: Sequence[Row], ahead: Sequence[Row] = ()) -> None:
        config = self.target.config
        start, eos = config.decoder_start_token_id, config.eos_token_ids
        for row in rows:
            row.search = BeamSearch(row.settings, start, eos, row.watch)
        super().insert(rows, ahead)

    def step(self) -> None:
        """Continues every beam by one token."""
        started = self.clock()
        beams = [beam for search in self.searches for beam in search.beams]
        tokens = mx.array([beam.tokens[-1:] for beam in beams], mx.int32)
        positions = [len(beam.tokens) - 1 for beam in beams]
        logits = self.target.decode(tokens, self.cache, positions)[:, 0]
        scores, indices, finite = self._continuations(logits, beams)
        mx.eval(scores, indices, finite)  # the only wait
        seconds = self.clock() - started
        by_row = zip(scores.tolist(), indices.tolist(), finite.tolist(), strict=True)
        for row, (continued, indices, finite) in zip(self.rows, by_row, strict=True):
            search = row.search
            assert search is not None, "begun when the row joined"
            row.stats.target_calls += 1
            row.stats.count(0, 0, "target")
            row.stats.decode_seconds += seconds
            decided = row.decided
            if finite:
                search.advance(continued, indices, self.target.config.vocab_size)
                row.tokens = search.beams[0].tokens
            if not finite or (search.done and not search.texts):
                row.fail_without_choice(decided)
            elif search.done:
                finalize(row, search.texts[0])
        self.drop_finished()
        if self.rows:
            self.cache.reorder(
                [i * self.beams + k for i, s in enumerate(self.searches) for k in s.parents]
            )

    def _continuations(
        self, logits: mx.array, beams: Sequence[Hypothesis]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The best continuations: scores (B, C), indices (B, C); bool (B,): all below +inf."""
        # As in transformers, logits processors see log-probabilities, which are not normed again.
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._processing:
            counts = [1 if beam.score > NO_BEAM else 0 for beam in beams]  # not of empty places
            history = History.align([beam.tokens for beam in beams])
            logprobs = self._processing(history, logprobs[:, None], counts)[:, 0]
        before = np.array([beam.score for beam in beams], np.float32)
        scores = (logprobs + mx.array(before)[:, None]).reshape(len(self.rows), -1)
        count = min(self.searches[0].looked_at, scores.shape[1])
        return *largest(scores, count), mx.max(scores, axis=-1) < mx.inf

    @property
    def searches(self) -> list[BeamSearch]:
        return [row.search for row in self.rows if row.search]

    def _collect(self) -> None:
        """Collects the logits processors of all rows, repeated for every beam."""
        settings = [row.settings for row in self.rows for _ in range(self.beams)]
        self._processing = None
        if any(row.processes_logits for row in settings):
            self._processing = Processing(settings, self.target.config.eos_token_ids)
