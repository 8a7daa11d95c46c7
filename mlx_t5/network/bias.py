"""T5's relative position bias: all at once, or in chunks of queries.

Raffel et al. (arXiv 1910.10683), section 2.1: every head learns a scalar for each bucket of
distances (key position minus query position), which is added to the attention scores.

Symbols: B rows, H heads, T queries per row, N keys, S source positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from mlx_t5.backend import mx, nn
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.network.linear import Derived

# Maximum size of an encoder's bias (rows · heads · source · source), in numbers: 128 MB in float32.
# For one source of 4,096 tokens and 64 heads, the whole bias would take 4 GB.
MAX_SCORES = 1 << 25
LEAST_QUERIES = 32  # minimum size of a chunk; smaller ones are slow on every device


def relative_buckets(
    distances: np.ndarray, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """The bucket of each distance, key position minus query position.

    Half of the buckets hold one distance each. The others grow logarithmically, and the last holds
    all distances from `max_distance` on. If `bidirectional`, the keys to the right of the query
    have half of the buckets for themselves; otherwise they are all in bucket 0.
    """
    right = np.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        right = np.where(distances > 0, num_buckets, 0)
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    exact = num_buckets // 2
    # In NumPy, so that buckets are the same on every device. Some boundaries fall on whole numbers,
    # so the last bit of the logarithm matters. As in the models' training, every operation is
    # rounded to float32; the logarithm is rounded from float64, as float32 logarithms differ
    # between libraries.
    ratio = np.maximum(distances, exact).astype(np.float32) / np.float32(exact)
    log = np.log(ratio.astype(np.float64)).astype(np.float32)
    scaled = log / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    large = np.minimum(exact + scaled.astype(distances.dtype), num_buckets - 1)
    return right + np.where(distances < exact, distances, large)


class RelativeBias(nn.Module):
    """The learned bias between queries and keys, and in the decoder the causal mask.

    All distances beyond the config's maximum have the same bias, so a short table is enough. In the
    decoder (`causal`) its last entry is -inf, for all keys to the right of the query: one gather
    gives bias and causal mask at once.
    """

    def __init__(self, config: T5Config, causal: bool):
        super().__init__()
        buckets, heads = config.relative_attention_num_buckets, config.num_heads
        self.weight = mx.random.normal((buckets, heads), scale=heads**-0.5)
        self._left = config.relative_attention_max_distance
        self._right = 1 if causal else self._left
        distances = np.arange(-self._left, self._right + 1)
        self._buckets = relative_buckets(distances, not causal, buckets, self._left)
        if causal:
            self._buckets[-1] = buckets
        self._table = Derived()  # making it takes a tenth of a small pass

    def index(self, queries: np.ndarray, keys: int) -> mx.array:
        """Indices into the table (B, T, N), for queries at positions (B, T) and keys at 0 … N-1."""
        # In NumPy, as a device would need about ten operations for so few numbers.
        distance = np.arange(keys, dtype=np.int32) - queries[:, :, None].astype(np.int32)
        return mx.array(np.clip(distance, -self._left, self._right) + self._left)

    def __call__(self, index: mx.array) -> mx.array:
        """The bias (B, H, T, N) for indices from `index`."""
        table = self._table.of([self], self._make_table)
        # Contiguous, because attention would otherwise copy it in every layer.
        return mx.contiguous(mx.take(table, index, axis=1).swapaxes(0, 1))

    def _make_table(self) -> mx.array:
        hidden = mx.full((1, self.weight.shape[1]), -mx.inf, self.weight.dtype)
        rows = mx.concatenate([self.weight, hidden])
        return mx.contiguous(rows[mx.array(self._buckets)].T)


def queries_at_once(rows: int, heads: int, source: int) -> int:
    """The number of queries in an encoder's chunk: the whole source if the bias is small."""
    fitting = MAX_SCORES // (rows * heads * source)
    return source if fitting >= source else max(LEAST_QUERIES, fitting)


@dataclass(frozen=True)
class ChunkedBias:
    """The bias of an encoder layer for a long source, computed one chunk of queries at a time."""

    table: RelativeBias
    source: int
    queries: int
    hidden: mx.array | int  # (B, 1, 1, S), very negative at padding; 0 without padding

    def __iter__(self) -> Iterator[tuple[slice, mx.array]]:
        """Yields the positions of each chunk of queries, and its bias (B or 1, H, T, S)."""
        for start in range(0, self.source, self.queries):
            chunk = slice(start, min(start + self.queries, self.source))
            index = self.table.index(np.arange(start, chunk.stop)[None], self.source)
            yield chunk, self.table(index) + self.hidden


def hiding(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """A bias that hides scores where a mask is False; finite, because -inf alone gives NaN."""
    return mx.where(mask, 0.0, mx.finfo(dtype).min).astype(dtype)


Mask: TypeAlias = mx.array | ChunkedBias | None


def source_biases(
    tables: Sequence[RelativeBias], batch: int, length: int, mask: mx.array | None
) -> Sequence[Mask]:
    """The bias (B or 1, H, S, S) of an encoder pass from each table, with the mask (B, S)."""
    queries = queries_at_once(batch, tables[0].weight.shape[1], length)
    hidden = 0 if mask is None else hiding(mask[:, None, None], tables[0].weight.dtype)
    if queries < length:
        return [ChunkedBias(table, length, queries, hidden) for table in tables]
    index = tables[0].index(np.arange(length)[None], length)
    return [table(index) if mask is None else table(index) + hidden for table in tables]
