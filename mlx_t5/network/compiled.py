"""A pass over one position that is described once and run many times.

Describing the pass of a small draft takes the host longer than a GPU computes it. `mx.compile`
keeps what was described for arrays of the same shapes. So positions are an array here, attention
sees all slots of the cache, and on a GPU sources are padded to multiples of 32 (cache.py).

Without a GPU nothing is compiled: MLX would call a C++ compiler, for seconds the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import cpu_only, mx
from mlx_t5.network.cache import Cache, KeysValues
from mlx_t5.network.ranks import ranks_of

if TYPE_CHECKING:
    from mlx_t5.network.interface import Seq2Seq

MOST_SHAPES = 64  # what is kept; then it starts over


def compiled_step(model: Seq2Seq) -> Callable[[mx.array, Any, list[int]], mx.array]:
    """`decode` of a model for one new token a row, compiled on a GPU.

    Not where ranks share the model, as sums over them are made on the CPU.
    """
    return model.decode if cpu_only() or ranks_of(model).size > 1 else CompiledStep(model)


class CompiledStep:
    """`decode` of a model for one new token a row, compiled."""

    def __init__(self, model: Seq2Seq) -> None:
        """Prepares to describe a model's pass; its weights must not be replaced afterwards."""
        self.model = model
        self._shapes: set[tuple[int | bool, ...]] = set()
        self._run = mx.compile(self._pass)

    def __call__(self, tokens: mx.array, cache: Any, offsets: list[int]) -> mx.array:
        """float32 logits (B, 1, V) after tokens (B, 1), as the model's `decode` returns them."""
        if not isinstance(cache, Cache):
            return self.model.decode(tokens, cache, offsets)
        shape = *cache.keys[0].shape, *cache.cross[0][0].shape, cache.mask is None
        if shape not in self._shapes and len(self._shapes) == MOST_SHAPES:
            self._shapes.clear()
            self._run = mx.compile(self._pass)
        self._shapes.add(shape)
        mask = [] if cache.mask is None else [cache.mask]
        logits, cache.keys, cache.values = self._run(
            tokens, mx.array(offsets), cache.keys, cache.values, cache.cross, mask
        )
        return logits

    def _pass(
        self,
        tokens: mx.array,
        offsets: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        cross: list[KeysValues],
        mask: list[mx.array],
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        cache = Cache(cross, mask[0] if mask else None, capacity=1)
        cache.keys, cache.values = list(keys), list(values)
        logits = self.model.decode(tokens, cache, offsets, traced=True)
        return logits, cache.keys, cache.values
