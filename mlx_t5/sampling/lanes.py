"""The sequences that the target continues side by side: one a row, K of a row that searches.

A row's lanes share its prompt, whose cross-attention the cache holds once. They are as long as each
other and feed one token a step, while other rows of the batch have proposals judged. The best
continuations of all beams are found on the device, so a step waits for it once, as without beams.

Symbols: B rows, L lanes, G rows that search, K beams, C continuations, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.network.cache import Cache
from mlx_t5.requests import Row
from mlx_t5.sampling.beams import NO_BEAM, Hypothesis, largest
from mlx_t5.sampling.commit import no_choice
from mlx_t5.sampling.rows import processing_of

TOO_FEW = "the search has found {} of {} texts; the rules for the text allow no more"


class Lanes:
    """What the target continues for the rows of a batch: K beams of a row, or its one text."""

    def __init__(self, rows: Sequence[Row], eos: Sequence[int]) -> None:
        """Lays out the lanes of B rows, in their order."""
        self._rows = rows
        counts = [len(row.lanes) for row in rows]
        self._owners = [i for i, count in enumerate(counts) for _ in range(count)]
        self._first = list(accumulate(counts, initial=0))[:-1]
        self._searches = [row.search for row in rows if row.search]
        self._beams = [lane for lane, i in enumerate(self._owners) if rows[i].search]
        self._processing = processing_of([rows[self._owners[b]].settings for b in self._beams], eos)

    def tokens(self) -> list[list[int]]:
        """The tokens of each lane (L)."""
        return [tokens for row in self._rows for tokens in row.lanes]

    def spread(self, of_rows: mx.array) -> mx.array:
        """(B, …) → (L, …): every lane gets its row's."""
        return of_rows[mx.array(self._owners)] if self._searches else of_rows

    def of_rows(self, of_lanes: mx.array) -> mx.array:
        """(L, …) → (B, …): every row gets its first lane's."""
        return of_lanes[mx.array(self._first)] if self._searches else of_lanes

    def continuations(self, logits: mx.array) -> list[mx.array]:
        """Finds the best ways to go on, of every row that searches; lazy.

        Args:
            logits: (L, T, V) float32 of the target; of beams the first position counts.

        Returns:
            Nothing if no row searches. Otherwise scores (G, C) float32 in falling order, places
            (G, C) as `BeamSearch.advance` takes them, and whether (G,) all logits were numbers.
        """
        if not self._searches:
            return []
        logits = logits[mx.array(self._beams), 0]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._processing:
            beams = [beam for search in self._searches for beam in search.beams]
            tokens, asked = [b.tokens for b in beams], [int(b.score > NO_BEAM) for b in beams]
            logprobs = self._processing.after(tokens, None, logprobs[:, None], asked)[:, 0]
        places, before = self._grid()
        scores = (logprobs[mx.array(places)] + mx.array(before)[..., None]).flatten(1)
        count = min(max(search.looked_at for search in self._searches), scores.shape[1])
        return [*largest(scores, count), mx.max(scores, axis=-1) < mx.inf]

    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Which of all beams are each row's (G, K), and their scores (G, K) float32.

        K is the same for every row; what a row has not got has the score of no beam.
        """
        most, first = max(search.size for search in self._searches), 0
        places = np.zeros((len(self._searches), most), np.int32)
        scores = np.full(places.shape, NO_BEAM)
        for g, search in enumerate(self._searches):
            places[g] = first + np.minimum(np.arange(most), search.size - 1)
            scores[g, : search.size] = [beam.score for beam in search.beams]
            first += search.size
        return places, scores

    def commit(self, found: Sequence[mx.array], vocab_size: int, seconds: float) -> None:
        """Advances every search by what `continuations` has found; those that end finish the row.

        Args:
            found: computed.
            vocab_size: V.
            seconds: that the step took.
        """
        columns = iter(zip(*(array.tolist() for array in found), strict=True))
        for row in self._rows:
            if search := row.search:
                scores, places, sound = next(columns)
                row.stats.count(0, 0, "target")
                row.stats.decode_seconds += seconds
                if sound:
                    search.advance(scores, places, vocab_size)
                if not sound or (search.done and not search.texts):
                    no_choice(row, len(row.lanes[0]) - 1)
                elif search.done:
                    become(row, search.texts[0])

    def follow(self, cache: Cache) -> None:
        """Gives every lane what the cache holds of the one it continues, after a step."""
        if not self._searches:
            return
        parents: list[int] = []
        for row, first in zip(self._rows, self._first, strict=True):
            parents += [first + k for k in (row.search.parents if row.search else [0])]
        cache.reorder(parents)


def become(row: Row, text: Hypothesis) -> Row:
    """Finishes a row with a text that its search has found; returns it."""
    row.committed, row.writers = text.tokens, ["target"] * (len(text.tokens) - 1)
    row.watch, row.ended, row.finish_reason = text.watch, text.ended, text.reason
    row.score = float(text.score)
    return row


def texts_of(row: Row) -> list[Row]:
    """A finished row for each text that is wanted of a finished row, the best first."""
    count = row.settings.num_return_sequences
    if row.error or not row.search:
        return [row] * count
    copies = (replace(row, stats=replace(row.stats)) for _ in range(count - 1))
    rows = [row, *map(become, copies, row.search.texts[1:count])]
    for _ in range(count - len(rows)):
        rows.append(replace(row, stats=replace(row.stats)))
        rows[-1].fail(TOO_FEW.format(len(row.search.texts), count))
    return rows
