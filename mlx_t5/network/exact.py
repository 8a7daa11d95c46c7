"""Decoding whose bits do not depend on what was proposed, or on the rows beside a row.

A sum is rounded in the order in which it is taken, and kernels take it in another one for another
number of rows. So a pass over gamma + 1 positions may round differently from gamma + 1 passes over
one. Here every pass has the same shape: each row is padded to `width` positions, and the batch to
a number of rows that is known to give the bits of a full one (exactness.py tells which). Products
see rows x width rows, whatever is proposed. Attention and the encoder, whose sums run over
positions, work on each prompt alone.

Symbols: B rows in flight, R rows of a pass, W width, S source positions, T target positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.network.attention import ByRow
from mlx_t5.network.cache import Cache, Slots
from mlx_t5.network.interface import Seq2Seq
from mlx_t5.network.ranks import ranks_of


class ExactTarget:
    """A model whose passes have one shape; see `interface.Seq2Seq` for its methods.

    Attributes:
        width: W, positions of every row in every pass.
        rows: numbers of rows that a pass may have, ascending; the last is the most in flight.
    """

    def __init__(self, model: Seq2Seq, width: int, rows: Sequence[int]) -> None:
        """Wraps a model.

        Args:
            model: the target.
            width: as the attribute.
            rows: as the attribute.
        """
        self.model, self.width, self.rows = model, width, tuple(rows)
        self.config, self.dtype = model.config, model.dtype
        self.pooling, self.can_decode = model.pooling, model.can_decode
        self.ranks = ranks_of(model)

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        """The encoder's output (B, S, d_model), each prompt's from a pass of its own.

        Args:
            ids: (B, S) source tokens.
            mask: (B, S), True for tokens; None if all are. The output is 0 where it is False.
        """
        lengths = _lengths(ids, mask)
        alone = [self.model.encode(ids[i : i + 1, :n]) for i, n in enumerate(lengths)]
        missing = [ids.shape[1] - n for n in lengths]
        padded = zip(alone, missing, strict=True)
        return mx.concatenate([mx.pad(x, [(0, 0), (0, n), (0, 0)]) for x, n in padded])

    def cache(
        self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1
    ) -> Any:  # an `ExactCache`
        """A cache for what `encode` returned, of every prompt without its padding."""
        lengths = _lengths(encoded, mask)
        alone = (encoded[i : i + 1, :n] for i, n in enumerate(lengths))
        return ExactCache([self.model.cache(x, None, capacity) for x in alone])

    def decode(
        self, tokens: mx.array, cache: Any, offsets: list[int] | mx.array, traced: bool = False
    ) -> mx.array:
        """float32 logits (B, T, V) of the token after each of `tokens` (B, T), T at most W.

        Raises:
            ValueError: there are more positions than W, or more rows than a pass may have.
        """
        assert isinstance(offsets, list), "padding has to be put in place on the host"
        batch, length = tokens.shape
        if length > self.width or batch > self.rows[-1]:
            raise ValueError(
                f"{batch} rows of {length} positions do not fit passes of {self.rows[-1]} rows of "
                f"{self.width}"
            )
        rows = next(count for count in self.rows if count >= batch)
        block = mx.pad(tokens, ((0, rows - batch), (0, self.width - length)))
        for row, offset in zip(cache.rows, offsets, strict=True):
            row.reserve(offset + self.width)
        seen: Any = Pass(cache.rows, rows)
        return self.model.decode(block, seen, offsets, traced)[:batch, :length]

    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int:
        """Bytes that the cache of prompts of so many source and target positions takes."""
        return self.model.cache_memory(prompts, source, target + self.width, rows)

    def encoder_memory(self, rows: int, source: int) -> int:
        """Bytes that it takes, at most, to encode rows of so many source positions."""
        return self.model.encoder_memory(1, source)


class ExactCache:
    """The state of rows that attend alone; the verbs are those of `cache.Cache`.

    Attributes:
        rows: a cache of one row for each.
    """

    def __init__(self, rows: list[Cache]) -> None:
        """Starts with these rows."""
        self.rows = rows

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for `mx.eval` and `mx.async_eval`."""
        return [array for row in self.rows for array in row.state]

    def reserve(self, capacity: int) -> None:
        """Does nothing: each row takes as many slots as it needs itself."""

    def trim(self, source: int, capacity: int) -> None:
        """Does nothing: no row is padded to the length of another."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order; one may be asked for several times."""
        kept: list[Cache] = []
        for row in (self.rows[i] for i in rows):
            kept.append(row.twin() if any(row is other for other in kept) else row)
        self.rows = kept

    def append(self, other: ExactCache) -> None:
        """Adds the rows of `other` at the end."""
        self.rows = self.rows + other.rows


@dataclass(frozen=True)
class PassSlots:
    """Where a pass writes; as `cache.Slots`, row by row.

    Attributes:
        positions: (R, W) absolute positions of the new tokens.
        seen: slots from the left that the row which is farthest on needs.
        offsets: position of the first new token of each row that is not padding.
        rows: the slots of these.
        mask: None, as no source is padded.
    """

    positions: mx.array
    seen: int
    offsets: list[int]
    rows: list[Slots]
    mask: None = None


class Pass:
    """The rows of an `ExactCache` as the decoder's layers see them in one pass.

    Attributes:
        batch: R; rows behind the last of `rows` are padding.
        prompts: R as well.
        cross_keys: those of the source, for each layer.
        cross_values: likewise.
    """

    def __init__(self, rows: list[Cache], batch: int) -> None:
        """Takes the rows and R."""
        self.rows, self.batch, self.prompts = rows, batch, batch
        self.cross_keys = [
            ByRow(list(k), batch) for k in zip(*(row.cross_keys for row in rows), strict=True)
        ]
        self.cross_values = [
            ByRow(list(v), batch) for v in zip(*(row.cross_values for row in rows), strict=True)
        ]

    def slots(self, offsets: list[int], length: int) -> PassSlots:
        """Places `length` new tokens a row behind the offsets; padding begins at 0."""
        starts = mx.array(offsets + [0] * (self.batch - len(offsets)))
        rows = [row.slots([at], length) for row, at in zip(self.rows, offsets, strict=True)]
        seen = max(slots.seen for slots in rows)
        return PassSlots(starts[:, None] + mx.arange(length), seen, offsets, rows)

    def update(
        self, layer: int, keys: mx.array, values: mx.array, slots: PassSlots
    ) -> tuple[ByRow, ByRow]:
        """Writes new keys and values (R, H, W, d_kv) of a layer into the slots of their rows.

        Returns:
            The keys and the values that each row may see.
        """
        seen = [
            row.update(layer, keys[i : i + 1], values[i : i + 1], where)
            for i, (row, where) in enumerate(zip(self.rows, slots.rows, strict=True))
        ]
        k, v = ([pair[i] for pair in seen] for i in (0, 1))
        return ByRow(k, self.batch, slots.offsets), ByRow(v, self.batch, slots.offsets)


def _lengths(rows: mx.array, mask: mx.array | None) -> list[int]:
    """How many positions of each row (B, S, …) are no padding."""
    return [rows.shape[1]] * len(rows) if mask is None else mask.sum(axis=1).tolist()
