"""Linear layers with few operations, and matrix products in the fastest form.

Layers that have the same input are joined into one, and the product itself adds the residual.

For M rows x (M, K) and a weight (N, K) the natural product is `x @ weight.T`. For few rows the
fastest form depends on the BLAS and its kernels; `FORMS` lists those that were measured to be
faster (docs/performance.md). Nothing is timed at run time, because on a busy machine that often
chose the slower form, and equal commands could round differently.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

from mlx_t5.backend import blas_name, cpu_only, mx, nn
from mlx_t5.checkpoints.quantization import SETTINGS as QUANTIZATION

TILE = 128  # rows of the weight in a tile

Form = Callable[[mx.array, mx.array], mx.array]  # x (M, K), weight (N, K) -> (M, N)
Forms: TypeAlias = tuple[tuple[range, Form], ...]  # by the number of rows M

# A `Matrix` names its forms by an index, because `mx.compile` takes arrays and constants only.
COMBINATIONS: list[Forms] = [()]


class Derived:
    """Something computed from parameters, and computed again if one of them has been replaced."""

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._contents: list[Any] = []
        self._value: Any = None

    def of(self, modules: Sequence[nn.Module], compute: Callable[[], Any]) -> Any:
        """Returns what `compute` makes of the parameters of these modules."""
        # By identity, as comparing numbers would wait for the device; in C, as every pass does it.
        contents = [*modules, *chain.from_iterable(map(dict.values, self._modules))]
        same = all(map(operator.is_, contents, self._contents))
        if not same or len(contents) != len(self._contents):
            self._value = compute()
            self._modules = [part for module in modules for part in module.modules()]
            self._contents = [*modules, *chain.from_iterable(map(dict.values, self._modules))]
        return self._value


class Matrix(NamedTuple):
    """The weights of a linear layer without their module, in a form that `mx.compile` accepts.

    Attributes:
        arrays: the transposed weight (inputs, outputs), or quantized weight, scales, maybe biases.
        quantization: values of the attributes that `QUANTIZATION` names; empty if not quantized.
        forms: index in `COMBINATIONS` of the forms of the product that are faster here than
            `x @ weight.T`; 0, for none, on a GPU.
    """

    arrays: tuple[mx.array, ...]
    quantization: tuple[Any, ...] = ()
    forms: int = 0

    @classmethod
    def of(cls, layer: Any) -> Any:
        """The matrix of a linear layer, or of an embedding that is the output head."""
        arrays = [layer[name] for name in ("weight", "scales", "biases") if name in layer]
        if "scales" in layer:
            base = cls(tuple(arrays), tuple(getattr(layer, name) for name in QUANTIZATION))
        else:
            base = cls.plain(*arrays)
        adapter = getattr(layer, "adapter", None)
        return adapter(layer, base) if adapter else base

    @classmethod
    def plain(cls, weight: mx.array) -> Matrix:
        forms = faster_forms(*weight.shape, weight.dtype)
        if forms not in COMBINATIONS:
            COMBINATIONS.append(forms)
        return cls((weight.T,), forms=COMBINATIONS.index(forms))

    def times(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Multiplies x (M, K) by the weight and adds any residual (M, N), at once if possible."""
        (weight, *scales), quantization, forms = self
        form = None
        if forms:
            form = next((form for rows, form in COMBINATIONS[forms] if len(x) in rows), None)
        if scales:
            how = dict(zip(QUANTIZATION, quantization, strict=True))
            out = mx.quantized_matmul(x, weight, *scales, **how)
        elif form:
            out = form(x, weight.T)
        elif residual is None or residual.dtype != weight.dtype:
            out = x @ weight
        else:
            return mx.addmm(residual, x, weight)
        return out if residual is None else residual + out


def matrices(*layers: nn.Module) -> tuple[Matrix, ...]:
    """The matrices of layers with the same input; one if they are joined and unchanged since."""
    joined = getattr(layers[0], "joined", Derived()).of(layers, lambda: None)
    return tuple(map(Matrix.of, [joined] if joined else layers))


def join_layers(*layers: nn.Module) -> None:
    """Joins layers that have the same input, so that `matrices` returns one matrix for them.

    The layers' parameters become views of the joined ones, so joining needs no memory.
    """
    kinds = [(type(m), *(getattr(m, name, None) for name in QUANTIZATION)) for m in layers]
    if len(layers) == 1 or kinds != kinds[:1] * len(layers):
        return  # nothing to join, or quantized differently
    one = copy(layers[0])
    ends = list(accumulate(len(layer["weight"]) for layer in layers))[:-1]
    for name in layers[0].parameters():
        one[name] = mx.concatenate([layer[name] for layer in layers])
        for layer, array in zip(layers, mx.split(one[name], ends), strict=True):
            layer[name] = array
    mx.eval(one, *layers)
    layers[0].joined = Derived()
    layers[0].joined.of(layers, lambda: one)


def as_written(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def in_tiles(x: mx.array, weight: mx.array) -> mx.array:
    if weight.shape[0] % TILE:
        return as_written(x, weight)
    tiles = weight.reshape(-1, TILE, weight.shape[1])
    return (x @ tiles.swapaxes(1, 2)).swapaxes(0, 1).flatten(1)


def weight_first(x: mx.array, weight: mx.array) -> mx.array:
    return (weight @ x.T).T


def as_two_rows(x: mx.array, weight: mx.array) -> mx.array:  # for a single row
    return (mx.broadcast_to(x, (2, x.shape[1])) @ weight.T)[:1]


def _large(outputs: int, inputs: int) -> bool:
    return outputs * inputs >= 1 << 19  # smaller weights fit into the processor's cache


# Pattern for `blas_name`, numbers of rows M, condition on (N, K), form. The comments give the
# form's time relative to the natural form.
FORMS: tuple[tuple[str, range, Callable[[int, int], bool], Form], ...] = (
    # 0.3 to 0.6: OpenBLAS packs the weight first, except for products up to M · N · K = 10^6
    ("OpenBLAS .*(SkylakeX|Cooperlake|SapphireRapids)", range(1, 9), _large, in_tiles),
    ("MKL .*AVX-512", range(4, 7), _large, in_tiles),  # 0.75 to 0.8
    # 0.65 to 0.7: 16 rows take the time of 4 rows
    ("MKL .*AVX-512", range(7, 17), _large, weight_first),
    # 0.65 to 0.9
    ("MKL .*general", range(1, 2), lambda n, k: n * k >= 1 << 17 and k < 1024, as_two_rows),
    ("MKL .*general", range(3, 129), lambda n, k: n >= 1 << 14, in_tiles),  # 0.65 to 0.8
)


@cache
def faster_forms(outputs: int, inputs: int, dtype: mx.Dtype) -> Forms:
    """Forms of `x @ weight.T` for a weight (N, K) that are faster here, by the number of rows M."""
    if dtype != mx.float32 or not cpu_only():
        return ()  # BLAS multiplies float32 only, and GPUs do not need other forms
    matching = [row for row in FORMS if row[2](outputs, inputs) and re.match(row[0], blas_name())]
    return tuple((rows, form) for _, rows, _, form in matching)
