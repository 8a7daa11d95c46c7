"""Beam search: K hypotheses per prompt, extended by one token per step.

Texts and scores equal those of transformers 5 (generation/utils.py, `_beam_search`) if its
`generate` decodes each prompt alone:

    beam     s = the sum of its tokens' log-probabilities, after the logits processors
    step     takes the (1 + E) K best continuations of all beams; E is the number of end tokens,
             at least 1. A continuation that ends becomes a text if it is among the first K. The K
             best continuations that do not end become the next beams.
    text     score = s / n**length_penalty for n tokens, the end token included; the K best are kept
    end      when no beam is left, or there are K texts and either early_stopping is True or the
             best beam cannot beat the worst text. The best beam is scored like a text, with n = its
             present length, or n = max_tokens if early_stopping is "never" and length_penalty > 0.

If fewer than K continuations are allowed, transformers adds beams with scores of about -1e9. Here
the added beams have the score -inf and are never continued. The device finds the best continuations
(engine/beams.py); this module decides in Python which become beams and which become texts.

Symbols: K beams, V vocabulary; in `largest`, G rows of N values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.sampling.draws import in_blocks
from mlx_t5.settings import Settings

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Row
    from mlx_t5.text.detokenizer import TextWatch

TOO_FEW = "the search has found {} of {} texts; the rules for the text allow no more"
CHUNK = 128  # values in a chunk of `largest`


@dataclass(frozen=True)
class Hypothesis:
    """A text or its beginning; the score of a finished text is divided by the length penalty."""

    tokens: list[int]  # the start token first
    score: np.float32  # sum of log-probabilities
    watch: TextWatch | None = None  # searches the text for stop strings
    reason: str | None = None  # "stop" or "length"; None while the text is unfinished
    ended: bool = False  # whether the last token is an end token


NO_BEAM = np.float32(-np.inf)  # the score of a place that has no beam
WORST = np.finfo(np.float32).min  # the lowest score of a text


class BeamSearch:
    """The beam search of one row; K is the row's `num_beams`."""

    def __init__(
        self, settings: Settings, start: int, eos: Sequence[int], watch: TextWatch | None = None
    ) -> None:
        self.settings, self.eos = settings, eos
        self.size = settings.num_beams
        self.looked_at = (1 + max(len(eos), 1)) * self.size
        # K hypotheses of equal length, the best first. If fewer than K are left, duplicates of the
        # best with the score `NO_BEAM` fill the other places.
        self.beams: list[Hypothesis] = []
        self.parents: list[int] = []  # of each beam: index of the previous beam that it continues
        self.texts: list[Hypothesis] = []  # at most K, the best first
        self.done = False
        self._set_beams([(0, Hypothesis([start], np.float32(0), watch))])

    def advance(self, scores: Sequence[float], indices: Sequence[int], vocab_size: int) -> None:
        """Advances by one step; continuation k * vocab_size + token is beam k's, the best first."""
        going, finished = [], []
        for rank, (score, index) in enumerate(zip(scores, indices, strict=True)):
            if rank == self.looked_at or score == NO_BEAM:
                break
            parent, token = divmod(index, vocab_size)
            grown = self._grow(self.beams[parent], token, np.float32(score))
            if grown.reason is None:
                going.append((parent, grown))
            elif rank < self.size:
                final = self._by_length(grown.score, len(grown.tokens) - 1)
                finished.append(replace(grown, score=final))
        ranked = sorted(self.texts + finished, key=lambda text: -text.score)
        self.texts = ranked[: self.size]
        self.done = not going or not self._may_improve(going[0][1])
        if not self.done:
            self._set_beams(going[: self.size])

    def _set_beams(self, going: list[tuple[int, Hypothesis]]) -> None:
        """Sets the beams from pairs of an old beam's index and the hypothesis grown from it."""
        parent, best = going[0]
        filled = [*going, *[(parent, replace(best, score=NO_BEAM))] * (self.size - len(going))]
        self.parents, self.beams = [k for k, _ in filled], [beam for _, beam in filled]

    def _grow(self, beam: Hypothesis, token: int, score: np.float32) -> Hypothesis:
        watch = beam.watch.fork() if beam.watch else None
        ended = token in self.eos
        if watch and not ended:
            watch.take([token])
        reason = None
        if ended or (watch and watch.stopped):
            reason = "stop"
        elif len(beam.tokens) == self.settings.max_tokens:
            reason = "length"
        if watch and reason:
            watch.finish()
        return Hypothesis([*beam.tokens, token], score, watch, reason, ended)

    def _by_length(self, score: np.float32, length: int) -> np.float32:
        # As in transformers, the penalty is 0 or infinity if float32 cannot hold it. Unlike there,
        # the score stays finite, because JSON has no infinity.
        with np.errstate(over="ignore", divide="ignore"):
            penalty = np.float32(float(length) ** self.settings.length_penalty)
            return np.maximum(score / penalty, WORST)

    def _may_improve(self, best: Hypothesis) -> bool:
        settings, length = self.settings, len(best.tokens) - 1
        if len(self.texts) < self.size:
            return True
        if settings.early_stopping is True:
            return False
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = settings.max_tokens
        return bool(self._by_length(best.score, length) > self.texts[-1].score)


def finalize(row: Row, text: Hypothesis) -> Row:
    """Finishes a row with a text that its beam search found; returns the row."""
    row.tokens, row.origins = text.tokens, ["target"] * (len(text.tokens) - 1)
    row.watch, row.ended, row.finish_reason = text.watch, text.ended, text.reason
    row.score = float(text.score)
    return row


def texts_of(row: Row) -> list[Row]:
    """A row's `num_return_sequences` best texts as rows; missing ones have an error."""
    count = row.settings.num_return_sequences
    if row.error or not row.search:
        return [row] * count
    copies = (replace(row, stats=replace(row.stats), index=row.index + i) for i in range(1, count))
    rows = [row, *map(finalize, copies, row.search.texts[1:count])]
    for i in range(len(rows), count):
        rows.append(replace(row, stats=replace(row.stats), index=row.index + i))
        rows[-1].fail(TOO_FEW.format(len(row.search.texts), count))
    return rows


def largest(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row (G, N), descending, and their indices: (G, count)."""
    # The largest values are in the `count` chunks with the largest maxima: only these are sorted.
    chunks = in_blocks(values, CHUNK, -mx.inf)
    # Sorts the chunks by their place, so that among equal values the first comes first.
    best = mx.sort(mx.argsort(-chunks.max(axis=-1), axis=-1)[:, :count], axis=-1)[..., None]
    indices = (best * CHUNK + mx.arange(CHUNK)).flatten(1)
    chosen = mx.take_along_axis(chunks, best, axis=1).flatten(1)
    order = mx.argsort(-chosen, axis=-1)[:, :count]
    return mx.take_along_axis(chosen, order, axis=1), mx.take_along_axis(indices, order, axis=1)
