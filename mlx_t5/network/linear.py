"""Linear layers: few operations, and products in the form that reads the weights fastest.

Layers over the same input are joined to one, and a residual is added by the product itself.

Decoding is bound by reading weights. For x (M, K) and a weight (N, K) the natural product is
`x @ weight.T`. What is faster for few rows depends on the BLAS and its kernels; `FORMS` has what
was measured (docs/performance.md says how). Nothing is timed at run time: on a busy machine that
chose the slower form as often as not, and equal commands would not even multiply alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from mlx_t5.backend import blas_name, cpu_only, mx, nn

TILE = 128  # rows of the weight that are multiplied at a time
QUANTIZATION = ("group_size", "bits", "mode")  # what `nn.QuantizedLinear` calls it

Form = Callable[[mx.array, mx.array], mx.array]


class Linear(nn.Linear):
    """A linear layer without bias over rows (M, K)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """The outputs (M, N), plus a residual, if any, in one operation where there is one."""
        weight = self["weight"]
        if residual is None or residual.dtype == weight.dtype:
            return product(x, weight, residual)
        return residual + product(x, weight)

    def to_quantized(self, *args: Any, **options: Any) -> QuantizedLinear:
        """This layer as `nn.quantize` wants it."""
        return QuantizedLinear.from_linear(self, *args, **options)


class QuantizedLinear(nn.QuantizedLinear):
    """A quantised `Linear`."""

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """As of `Linear`."""
        out = super().__call__(x)
        return out if residual is None else residual + out


class Embedding(nn.Embedding):
    """An embedding that is the output head as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        """The logits (M, V) of states x (M, d_model)."""
        return product(x, self.weight)


@dataclass
class Joined:
    """Several layers over the same input as one.

    Attributes:
        layer: has their weights one below the other.
        weights: of each, views of its.
        ends: where the outputs of each but the last end.
    """

    layer: nn.Module
    weights: list[mx.array]
    ends: list[int]


def join(*layers: nn.Module) -> None:
    """Have `together` compute these layers as one product.

    They keep their parameters, as views of the joined ones, so that this takes no memory. Layers
    that are quantised in different ways are left as they are.
    """
    kinds = [(type(m), *(getattr(m, name, None) for name in QUANTIZATION)) for m in layers]
    if kinds != kinds[:1] * len(layers):
        return
    one = copy(layers[0])
    ends = list(accumulate(len(layer["weight"]) for layer in layers))[:-1]
    for name in layers[0].parameters():
        one[name] = mx.concatenate([layer[name] for layer in layers])
        for layer, array in zip(layers, mx.split(one[name], ends), strict=True):
            layer[name] = array
    mx.eval(one, *layers)
    layers[0].joined = Joined(one, [layer["weight"] for layer in layers], ends)


def together(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """What each of the layers makes of x (M, K); one product if they are joined.

    A layer that has been given other weights since is no longer.
    """
    joined = getattr(layers[0], "joined", None)
    if not joined or any(m["weight"] is not w for m, w in zip(layers, joined.weights, strict=True)):
        return [layer(x) for layer in layers]
    return mx.split(joined.layer(x), joined.ends, axis=1)


def product(x: mx.array, weight: mx.array, addend: mx.array | None = None) -> mx.array:
    """x (M, K) times the transpose of `weight` (N, K), plus `addend`, if any: (M, N)."""
    form = fastest(x.shape[0], *weight.shape, weight.dtype)
    if form is natural:
        return x @ weight.T if addend is None else mx.addmm(addend, x, weight.T)
    out = form(x, weight)
    return out if addend is None else addend + out


def natural(x: mx.array, weight: mx.array) -> mx.array:
    """As it is written."""
    return x @ weight.T


def in_tiles(x: mx.array, weight: mx.array) -> mx.array:
    """By many small products."""
    if weight.shape[0] % TILE:
        return natural(x, weight)
    tiles = weight.reshape(-1, TILE, weight.shape[1])
    return (x @ tiles.swapaxes(1, 2)).swapaxes(0, 1).flatten(1)


def weight_first(x: mx.array, weight: mx.array) -> mx.array:
    """With the weight on the left."""
    return (weight @ x.T).T


def doubled(x: mx.array, weight: mx.array) -> mx.array:
    """One row (1, K) as two equal ones."""
    return (mx.broadcast_to(x, (2, x.shape[1])) @ weight.T)[:1]


def _large(outputs: int, inputs: int) -> bool:
    return outputs * inputs >= 1 << 19  # smaller ones stay in the processor's cache


def _narrow(outputs: int, inputs: int) -> bool:
    return outputs * inputs >= 1 << 17 and inputs < 1024


def _head(outputs: int, inputs: int) -> bool:
    return outputs >= 1 << 14


# What `blas_name` says, the numbers of rows M, which weights (N, K), and their form.
FORMS: tuple[tuple[str, range, Callable[[int, int], bool], Form], ...] = (
    # It copies the weight into an order of its own first, but for products of up to a million
    # pairs of numbers: 0.3 to 0.6 of the time.
    ("OpenBLAS .*(SkylakeX|Cooperlake|SapphireRapids)", range(1, 9), _large, in_tiles),
    ("MKL .*AVX-512", range(4, 7), _large, in_tiles),  # 0.75 to 0.8
    # 0.65 to 0.7: as long for 16 rows as for 4
    ("MKL .*AVX-512", range(7, 17), _large, weight_first),
    ("MKL .*general", range(1, 2), _narrow, doubled),  # 0.65 to 0.9
    ("MKL .*general", range(3, 129), _head, in_tiles),  # 0.65 to 0.8
)


@cache
def fastest(rows: int, outputs: int, inputs: int, dtype: mx.Dtype) -> Form:
    """The form to multiply x (rows, inputs) and a weight (outputs, inputs) in, on this device."""
    if dtype != mx.float32 or not cpu_only():
        return natural  # a BLAS multiplies no other type, and a GPU needs none
    return fastest_with(blas_name(), rows, outputs, inputs)


def fastest_with(blas: str, rows: int, outputs: int, inputs: int) -> Form:
    """The form for float32 on a CPU with this BLAS."""
    for name, numbers, suits, form in FORMS:
        if rows in numbers and suits(outputs, inputs) and re.match(name, blas):
            return form
    return natural
