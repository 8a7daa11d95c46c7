"""LoRA and DoRA adapters in training.

LoRA (Hu et al., https://arxiv.org/abs/2106.09685) adds a product of two narrow matrices to a frozen
weight: W + s · B @ A. DoRA (Liu et al., https://arxiv.org/abs/2402.09353) scales each row of the
sum to a learned length m: m · (W + s · B @ A) / ||W + s · B @ A||, with the norm as a constant in
the gradient. Adapters are not merged during training, so W may be quantized, and the gradient of W
is never computed: `Matrix.of` returns an `Adapted` for a layer with A and B (PEFT's names).

Symbols: M rows, K inputs, N outputs, r rank, s scale; x (M, K) input, W (N, K) frozen weight,
A (r, K) and B (N, r) narrow matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from mlx_t5.backend import mx
from mlx_t5.model import T5, Dropout
from mlx_t5.network.linear import Matrix
from mlx_t5.network.sharing import plain_weights

DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"  # as PEFT calls A, B and m


class Adapted(NamedTuple):
    """A `Matrix` W with an adapter beside it: W + s · B @ A; DoRA scales its rows to lengths m."""

    base: Matrix
    down: mx.array
    up: mx.array
    scale: float
    rate: float = 0.0
    key: mx.array | None = None
    magnitude: mx.array | None = None
    squares: mx.array | None = None

    def times(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        seen = x.astype(self.down.dtype)
        if self.key is not None:
            seen = Dropout(self.rate, self.key[None])(seen, 0)
        change = self.scale * ((seen @ self.down.T) @ self.up.T)
        if self.magnitude is None:
            out = self.base.times(x, residual)
            return out + change.astype(out.dtype)
        plain = self.base.times(x)
        ratio = self.magnitude / mx.stop_gradient(self._norms())
        other = plain if self.key is None else self.base.times(seen.astype(x.dtype))
        out = plain + ((ratio - 1) * other + ratio * change).astype(plain.dtype)
        return out if residual is None else residual + out

    def _norms(self) -> mx.array:
        """Row norms of W + s · B @ A, without computing that matrix; inf for zero rows."""
        # |w + s·b @ A|² = |w|² + s·b·(2·A @ w + s·(A @ A.T) @ b), row by row.
        crossed = self.base.times(self.down).T.astype(mx.float32)  # W @ A.T
        mixed = 2 * crossed + self.scale * (self.up @ (self.down @ self.down.T))
        squares = self.squares + self.scale * mx.sum(self.up * mixed, axis=1)
        return mx.sqrt(mx.where(squares > 0, squares, mx.inf))


class Adapter:
    """Makes the `Adapted` of a layer, which has the matrices A and B and the lengths m itself."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings  # the other fields of `Adapted`

    def __call__(self, layer: Any, base: Matrix) -> Adapted:
        magnitude = layer.get(MAGNITUDE)
        return Adapted(base, layer[DOWN], layer[UP], magnitude=magnitude, **self.settings)


class Adapters:
    """The adapters of one model."""

    def __init__(
        self,
        model: T5,
        paths: Collection[str],
        rank: int,
        scale: float,
        dora: bool,
        dropout: float,
        seed: int,
    ) -> None:
        """Freezes a model and adds adapters to the layers at `paths`; no output changes yet."""
        model.freeze()
        modules: dict[str, Any] = dict(model.named_modules())
        for module in modules.values():
            module.__dict__.pop("joined", None)  # layers with adapters are multiplied one by one
        self._dropout, self._layers = dropout, [modules[path] for path in sorted(paths)]
        keys = mx.random.split(mx.random.key(seed), len(paths))
        for layer, key in zip(self._layers, keys, strict=True):
            layer.adapter = Adapter(scale=scale, rate=dropout)
            weight = plain_weights(layer)["weight"]
            outputs, inputs = weight.shape
            bound = 1 / math.sqrt(inputs)  # as nn.Linear and PEFT initialize
            layer[DOWN] = mx.random.uniform(-bound, bound, (rank, inputs), key=key)
            layer[UP] = mx.zeros((outputs, rank))
            if dora:
                squares = mx.sum(mx.square(weight.astype(mx.float32)), axis=1)
                mx.eval(squares)
                layer.adapter.settings["squares"] = squares
                layer[MAGNITUDE] = mx.sqrt(squares)
            mx.eval(layer.parameters())

    def drop(self, key: mx.array | None) -> None:
        """Sets the random key of the adapters' dropout; None switches it off."""
        if self._dropout:
            count = len(self._layers)
            keys = [None] * count if key is None else list(mx.random.split(key, count))
            for layer, layer_key in zip(self._layers, keys, strict=True):
                layer.adapter.settings["key"] = layer_key
