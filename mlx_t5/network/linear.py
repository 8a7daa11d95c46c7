"""Products with a weight matrix, in the form that reads the weights fastest.

Decoding is bound by reading weights. For x (M, K) and a weight (N, K) most libraries do that well
in any form, and then a product is simply `x @ weight.T`. OpenBLAS on x86 copies the weight into an
order of its own first, which for few rows takes longer than to multiply, unless the product is
small: its kernels for AVX-512 multiply up to a million pairs of numbers straight from where they
are. So there, on a CPU, a product with a wide weight is made of many small ones.
"""

from __future__ import annotations

import ctypes
import sys

from mlx_t5.backend import cpu_only, mx, nn

SMALL = 1_000_000  # pairs of numbers M x N x K that OpenBLAS multiplies without copying
MOST_ROWS = 12  # with more, copying pays
LEAST_WIDTH = 1024  # K from which copying costs more than further calls
LEAST_BLOCK = 16  # rows of the weight that are worth a call
KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")  # OpenBLAS's names of those for AVX-512


class Linear(nn.Linear):
    """A linear layer without bias over rows (M, K)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)
        self._in_parts = small_products(inputs)

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        return product_in_parts(x, weight) if self._in_parts else x @ weight.T


class Embedding(nn.Embedding):
    """An embedding that is the output head as well."""

    def __init__(self, count: int, width: int):
        super().__init__(count, width)
        self._in_parts = small_products(width)

    def as_linear(self, x: mx.array) -> mx.array:
        return product_in_parts(x, self.weight) if self._in_parts else super().as_linear(x)


def product_in_parts(x: mx.array, weight: mx.array) -> mx.array:
    """x (M, K) times the transpose of `weight` (N, K): (M, N), by small products if they pay."""
    block = block_rows(x.shape[0], *weight.shape) if weight.dtype == mx.float32 else 0
    if not block:
        return x @ weight.T
    blocks = weight.reshape(-1, block, weight.shape[1])
    return (x @ blocks.swapaxes(1, 2)).swapaxes(0, 1).flatten(1)


def block_rows(m: int, n: int, k: int) -> int:
    """Rows of a weight (n, k) to multiply at a time with m rows; 0 for all of them."""
    if m > MOST_ROWS or k < LEAST_WIDTH or m * n * k <= SMALL:
        return 0
    block = n & -n  # the largest power of two that divides n
    while block * m * k > SMALL:
        block //= 2
    return block if block >= LEAST_BLOCK else 0


def small_products(width: int) -> bool:
    """Whether MLX computes with an OpenBLAS that does better with small parts of such a weight.

    Args:
        width: K.
    """
    if width < LEAST_WIDTH or not sys.platform.startswith("linux") or not cpu_only():
        return False
    return openblas("openblas_get_corename") in KERNELS


def openblas(question: str) -> str | None:
    """What OpenBLAS answers to one of its functions without arguments; None if it is not there."""
    for name in ("libopenblas.so.0", "libopenblas.so"):
        try:
            ask = getattr(ctypes.CDLL(name), question)
        except (OSError, AttributeError):
            continue
        ask.restype = ctypes.c_char_p
        return ask().decode()
    return None
