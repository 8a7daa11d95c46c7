"""Products with a weight matrix, in the form that reads the weights fastest.

Decoding is bound by reading weights. For x (M, K) and a weight (N, K) the natural product is
`x @ weight.T`. What is faster for few rows depends on the BLAS and its kernels; `FORMS` has what
was measured (docs/performance.md). Nothing is timed at run time: on a machine that is busy that
took 80 to 600 ms a number of rows and chose the slower form as often as not, and then equal
commands would not even multiply alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from mlx_t5.backend import blas_name, cpu_only, mx, nn

BLOCK = 128  # rows of the weight in a block

Form = Callable[[mx.array, mx.array], mx.array]


class Linear(nn.Linear):
    """A linear layer without bias over rows (M, K)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return product(x, self["weight"])


class Embedding(nn.Embedding):
    """An embedding that is the output head as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self.weight)


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x (M, K) times the transpose of `weight` (N, K): (M, N)."""
    # A BLAS multiplies no other type, and a GPU needs none.
    if weight.dtype != mx.float32 or not cpu_only():
        return whole(x, weight)
    return fastest(x.shape[0], *weight.shape, blas_name())(x, weight)


def whole(x: mx.array, weight: mx.array) -> mx.array:
    """The natural form."""
    return x @ weight.T


def in_blocks(x: mx.array, weight: mx.array) -> mx.array:
    """By many small products."""
    if weight.shape[0] % BLOCK:
        return whole(x, weight)
    blocks = weight.reshape(-1, BLOCK, weight.shape[1])
    return (x @ blocks.swapaxes(1, 2)).swapaxes(0, 1).flatten(1)


def turned(x: mx.array, weight: mx.array) -> mx.array:
    """With the weight on the left."""
    return (weight @ x.T).T


def twice(x: mx.array, weight: mx.array) -> mx.array:
    """One row (1, K) as two equal ones."""
    return (mx.broadcast_to(x, (2, x.shape[1])) @ weight.T)[:1]


def _large(outputs: int, inputs: int) -> bool:
    return outputs * inputs >= 1 << 19  # smaller ones stay in the processor's cache


def _narrow(outputs: int, inputs: int) -> bool:
    return outputs * inputs >= 1 << 18 and inputs < 1024


def _head(outputs: int, inputs: int) -> bool:
    return outputs >= 1 << 14


# What `blas_name` says, the numbers of rows M, which weights (N, K), and their form.
FORMS: tuple[tuple[str, range, Callable[[int, int], bool], Form], ...] = (
    # It copies the weight into an order of its own first, but for products of up to a million
    # pairs of numbers: 0.3 to 0.6 of the time.
    ("OpenBLAS .*(SkylakeX|Cooperlake|SapphireRapids)", range(1, 9), _large, in_blocks),
    ("MKL .*AVX-512", range(4, 7), _large, in_blocks),  # 0.75 to 0.8
    # 0.65 to 0.7: as long for 16 rows as for 4
    ("MKL .*AVX-512", range(7, 17), _large, turned),
    ("MKL .*general", range(1, 2), _narrow, twice),  # 0.65 to 0.9
    ("MKL .*general", range(3, 129), _head, in_blocks),  # 0.65 to 0.8
)


@cache
def fastest(rows: int, outputs: int, inputs: int, blas: str) -> Form:
    """The form to multiply x (rows, inputs) and a weight (outputs, inputs) in with this BLAS."""
    for name, numbers, suits, form in FORMS:
        if rows in numbers and suits(outputs, inputs) and re.match(name, blas):
            return form
    return whole
