"""Relative position bias: T5's only knowledge of where a token stands.

Raffel et al. (arXiv 1910.10683), section 2.1: every head learns a scalar for each bucket of
distances key - query, which is added to the attention scores. The buckets are computed on the
host, so that rounding at their boundaries is the same on every device.

Symbols: B rows, T queries, N keys, H heads.
"""

from __future__ import annotations

import math

import numpy as np

from mlx_t5.backend import mx


def relative_buckets(
    distances: np.ndarray, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """The bucket of each distance key - query.

    Half of the buckets hold one distance each, the others grow logarithmically and the last
    holds all from `max_distance` on; if `bidirectional`, keys to the right of the query have the
    same buckets once more. Boundaries fall on whole numbers, so the last bit of the logarithm
    matters: as in the models' training each operation is rounded to float32, here from a
    float64 logarithm because float32 ones differ between libraries.
    """
    right = np.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        right = np.where(distances > 0, num_buckets, 0)
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    exact = num_buckets // 2
    ratio = np.maximum(distances, exact).astype(np.float32) / np.float32(exact)
    log = np.log(ratio.astype(np.float64)).astype(np.float32)
    scaled = log / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    large = np.minimum(exact + scaled.astype(distances.dtype), num_buckets - 1)
    return right + np.where(distances < exact, distances, large)


class RelativeBias:
    """Selects the learned bias between queries and keys, and -inf for what must not be seen.

    Beyond `max_distance` all distances share a bucket, so a short table over clipped distances
    serves any length. In the decoder (`causal`) its last entry stands for all keys to the right
    of the query and selects -inf: one gather gives bias and causal mask at once.
    """

    def __init__(self, num_buckets: int, max_distance: int, causal: bool):
        self.causal = causal
        self.left, self.right = max_distance, 1 if causal else max_distance
        distances = np.arange(-self.left, self.right + 1)
        table = relative_buckets(distances, not causal, num_buckets, max_distance)
        if causal:
            table[-1] = num_buckets
        self.table = mx.array(table.astype(np.int32))
        self._made: list[tuple[mx.array, mx.array]] = []  # weights, and what was made of each

    def index(self, queries: mx.array, keys: int) -> mx.array:
        """Entries of the table (B, T, N) for queries at positions (B, T) and keys at 0 … N-1."""
        distance = mx.arange(keys) - queries[:, :, None]
        return mx.clip(distance, -self.left, self.right) + self.left

    def by_distance(self, weights: list[mx.array]) -> list[mx.array]:
        """The bias (H, D) at each entry of the table, from learned weights (buckets, H).

        Made once for the same arrays: in a small model that is a tenth of a pass.
        """
        if [id(weight) for weight, _ in self._made] != [id(weight) for weight in weights]:
            self._made = [(weight, self._by_distance(weight)) for weight in weights]
        return [made for _, made in self._made]

    def _by_distance(self, weight: mx.array) -> mx.array:
        if self.causal:
            hidden = mx.full((1, weight.shape[1]), -mx.inf, weight.dtype)
            weight = mx.concatenate([weight, hidden])
        return mx.contiguous(weight[self.table].T)

    def __call__(self, by_distance: mx.array, index: mx.array) -> mx.array:
        """The bias (B, H, T, N) from one of `by_distance` and what `index` returned."""
        # Contiguous, because attention would otherwise copy it once in every layer.
        return mx.contiguous(mx.take(by_distance, index, axis=1).swapaxes(0, 1))
