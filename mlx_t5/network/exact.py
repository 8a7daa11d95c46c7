"""Exact decoding: a row's logits have the same bits whatever is proposed, in whatever batch.

Rounding depends on the order of summation, and kernels choose the order by the number of positions
in a pass. So one pass over several positions may round differently from several passes over one
position. Here the shape of a pass does not depend on the proposals: each row is padded to W
positions, and padding rows fill the pass up to R rows. exactness.py finds values of R and W with
which all rows are rounded alike. Attention and the encoder sum over positions, so they work on each
prompt alone.

Symbols: B rows in flight, R rows of a pass, W width, S source positions, T target positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx
from mlx_t5.network.attention import ByRow
from mlx_t5.network.cache import Cache, Slots
from mlx_t5.network.interface import WeightsRead

if TYPE_CHECKING:
    from model import T5


class ExactTarget:
    """A model whose passes have fixed shapes, with the methods of `model.T5` that decoding needs.

    Attributes:
        width: W, positions of each row in every pass.
        rows: numbers of rows that a pass may have, ascending, up to that of a full batch.
    """

    def __init__(self, model: T5, width: int, rows: Sequence[int]) -> None:
        """Wraps a model.

        Args:
            model: the target.
            width: positions of each row in every pass.
            rows: numbers of rows that a pass may have, ascending.
        """
        self.model, self.width, self.rows = model, width, tuple(rows)
        self.config, self.dtype = model.config, model.dtype
        self.pooling, self.can_decode = model.pooling, model.can_decode

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        """Returns the encoder's output (B, S, d_model), computed in one pass per prompt.

        Args:
            ids: source tokens (B rows, S positions).
            mask: (B, S), False for padding, whose output is set to 0; None without padding.
        """
        width, rows = ids.shape[1], []
        for i, length in enumerate(_lengths(ids, mask)):
            states = self.model.encode(ids[i : i + 1, :length])
            rows.append(mx.pad(states, [(0, 0), (0, width - length), (0, 0)]))
        return mx.concatenate(rows)

    def cache(
        self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1
    ) -> Any:  # an `ExactCache`
        """Returns a cache for the output of `encode`; each prompt is stored without padding."""
        rows = (encoded[i : i + 1, :length] for i, length in enumerate(_lengths(encoded, mask)))
        return ExactCache([self.model.cache(states, None, capacity) for states in rows])

    def decode(self, tokens: mx.array, cache: Any, offsets: list[int]) -> mx.array:
        """Returns float32 logits (B, T, vocabulary) for the token after each of `tokens` (B, T).

        Raises:
            ValueError: a row has more tokens (T) than `width`.
        """
        batch, length = tokens.shape
        rows = next(count for count in self.rows if count >= batch)
        tokens = mx.pad(tokens, ((0, rows - batch), (0, self.width - length)))
        padded: Any = ExactCache(cache.rows, rows)
        return self.model.decode(tokens, padded, offsets)[:batch, :length]

    def weights_read(self) -> WeightsRead:
        """Returns facts about the weights that a decoder pass of the wrapped model reads."""
        return self.model.weights_read()

    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int:
        """Returns `T5.cache_memory` (bytes) for `target + self.width` target positions per row."""
        return self.model.cache_memory(prompts, source, target + self.width, rows)

    def encoder_memory(self, rows: int, source: int) -> int:
        """Returns the encoder's peak memory in bytes; a pass has one row, whatever `rows` is."""
        return self.model.encoder_memory(1, source)


@dataclass
class ExactCache:
    """A cache per row, with the methods of `cache.Cache` that exact decoding needs.

    Attributes:
        rows: the cache of each row.
        batch: in a forward pass, the pass's number of rows; those beyond `rows` are padding.
    """

    rows: list[Cache]
    batch: int = 0

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for `mx.eval` and `mx.async_eval`."""
        return [array for row in self.rows for array in row.state]

    def trim(self, source: int, capacity: int) -> None:
        """Does nothing: no row is padded to the length of another row."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order; a repeated row is copied."""
        chosen: list[Cache] = []
        for row in (self.rows[i] for i in rows):
            chosen.append(row.twin() if any(row is other for other in chosen) else row)
        self.rows = chosen

    def append(self, other: ExactCache) -> None:
        """Adds the rows of `other` at the end."""
        self.rows = self.rows + other.rows

    def slots(self, offsets: list[int], length: int) -> PaddedSlots:
        """Returns the slots for `length` new tokens per row; padding rows start at position 0."""
        starts = mx.array(offsets + [0] * (self.batch - len(offsets)))
        rows = [row.slots([at], length) for row, at in zip(self.rows, offsets, strict=True)]
        cross = []
        for layer in zip(*(row.cross for row in self.rows), strict=True):
            keys, values = zip(*layer, strict=True)
            cross.append((ByRow(keys, self.batch), ByRow(values, self.batch)))
        positions = starts[:, None] + mx.arange(length)
        return PaddedSlots(rows, positions, offsets, self.batch, cross)


@dataclass(frozen=True)
class PaddedSlots:
    """The slots that a pass writes to and attends to; like `cache.Slots`, but row by row.

    Attributes:
        rows: the slots of each row that is not padding.
        positions: (R, W) absolute positions of each row's W new tokens.
        offsets: the first position of each row that is not padding.
        batch: number of rows R, padding included.
        cross: keys and values of cross-attention of each row, one pair per layer.
    """

    rows: list[Slots]
    positions: mx.array
    offsets: list[int]
    batch: int
    cross: list[tuple[ByRow, ByRow]]
    mask: None = None  # no source is padded

    @property
    def prompts(self) -> int:
        """The number of prompts: R, as each of the R rows has a prompt of its own."""
        return self.batch

    @property
    def seen(self) -> int:
        """The largest number of slots, counted from slot 0, that attention reads in any row."""
        return max(slots.seen for slots in self.rows)

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[ByRow, ByRow]:
        """Writes a layer's new keys and values (R rows, H heads, W positions, d_kv) to their slots.

        Returns:
            The keys and the values that each row attends to.
        """
        seen = [
            slots.update(layer, keys[i : i + 1], values[i : i + 1])
            for i, slots in enumerate(self.rows)
        ]
        k, v = zip(*seen, strict=True)
        return ByRow(k, self.batch, self.offsets), ByRow(v, self.batch, self.offsets)


def _lengths(rows: mx.array, mask: mx.array | None) -> list[int]:
    """Returns each row's number of positions without padding; `rows` is (rows, positions, …)."""
    return [rows.shape[1]] * len(rows) if mask is None else mask.sum(axis=1).tolist()
