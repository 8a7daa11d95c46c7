"""Linear layers: few operations, and products in the form that reads the weights fastest.

Layers over the same input are joined to one, and a residual is added by the product itself.

Decoding is bound by reading weights. For x (M, K) and a weight (N, K) the natural product is
`x @ weight.T`. What is faster for few rows depends on the BLAS and its kernels; `FORMS` has what
was measured (docs/performance.md). Nothing is timed at run time: on a busy machine that
chose the slower form as often as not, and equal commands would not even multiply alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from mlx_t5.backend import blas_name, cpu_only, mx, nn

TILE = 128  # rows of the weight that are multiplied at a time
QUANTIZATION = ("group_size", "bits", "mode")  # what `nn.QuantizedLinear` calls it

Form = Callable[[mx.array, mx.array], mx.array]  # of x (M, K) and a weight (N, K): (M, N)
Forms: TypeAlias = tuple[tuple[range, Form], ...]  # by the number of rows M


class Matrix(NamedTuple):
    """The weights of a linear layer, out of their module, as `mx.compile` takes them.

    Attributes:
        arrays: the transposed weight (K, N); quantised: weight, scales and, in some modes, biases.
        quantization: the layer's `QUANTIZATION`; empty if it is not quantised.
        forms: other than the natural one, on this device; none on a GPU.
        total: what all ranks of a group make of it, where each has a part of the weights.
    """

    arrays: tuple[mx.array, ...]
    quantization: tuple[Any, ...] = ()
    forms: Forms = ()
    total: Callable[[mx.array], mx.array] | None = None

    @classmethod
    def of(cls, layer: Any) -> Any:
        """Of a linear layer, or of an embedding that is the output head; see `sharding.shard`.

        One that is being adapted gives an `adapting.Adapted`.
        """
        arrays = [layer[name] for name in ("weight", "scales", "biases") if name in layer]
        if rows := getattr(layer, "rows", None):
            arrays = [array[rows] for array in arrays]
        if "scales" in layer:
            base = cls(tuple(arrays), tuple(getattr(layer, name) for name in QUANTIZATION))
        else:
            base = cls.plain(*arrays)
        base = base._replace(total=getattr(layer, "total", None))
        adapter = getattr(layer, "adapter", None)
        return adapter(layer, base) if adapter else base

    @classmethod
    def plain(cls, weight: mx.array) -> Matrix:
        """Of a weight (N, K)."""
        return cls((weight.T,), forms=forms(*weight.shape, weight.dtype))

    def times(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """The product (M, N) with x (M, K), plus a residual, if possible in one operation."""
        (weight, *scales), quantization, forms, total = self
        form = next((form for rows, form in forms if len(x) in rows), None) if forms else None
        if scales:
            how = dict(zip(QUANTIZATION, quantization, strict=True))
            out = mx.quantized_matmul(x, weight, *scales, **how)
        elif form:
            out = form(x, weight.T)
        elif residual is None or total or residual.dtype != weight.dtype:
            out = x @ weight
        else:
            return mx.addmm(residual, x, weight)
        if total:
            out = total(out)
        return out if residual is None else residual + out


def matrices(*layers: nn.Module) -> tuple[Matrix, ...]:
    """Of layers over the same input: one for all if they are joined and have kept their weights."""
    joined = getattr(layers[0], "joined", None)
    if not joined or any(m["weight"] is not w for m, w in zip(layers, joined.weights, strict=True)):
        return tuple(map(Matrix.of, layers))
    return (Matrix.of(joined.layer),)


@dataclass
class Joined:
    """Several layers over the same input as one.

    Attributes:
        layer: has their weights one below the other.
        weights: of each, views of its.
    """

    layer: nn.Module
    weights: list[mx.array]


def join_layers(*layers: nn.Module) -> None:
    """Have `matrices` give one matrix for these layers.

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
    layers[0].joined = Joined(one, [layer["weight"] for layer in layers])


def as_written(x: mx.array, weight: mx.array) -> mx.array:
    """As it is written."""
    return x @ weight.T


def in_tiles(x: mx.array, weight: mx.array) -> mx.array:
    """By many small products."""
    if weight.shape[0] % TILE:
        return as_written(x, weight)
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
def forms(outputs: int, inputs: int, dtype: mx.Dtype) -> Forms:
    """The forms that are faster than the natural one on this device, for a weight of this shape."""
    if dtype != mx.float32 or not cpu_only():
        return ()  # a BLAS multiplies no other type, and a GPU needs none
    return forms_with(blas_name(), outputs, inputs)


def forms_with(blas: str, outputs: int, inputs: int) -> Forms:
    """The forms for float32 on a CPU with this BLAS."""
    suiting = [row for row in FORMS if row[2](outputs, inputs) and re.match(row[0], blas)]
    return tuple((rows, form) for _, rows, _, form in suiting)
