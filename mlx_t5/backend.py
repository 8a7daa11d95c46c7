"""What must happen before MLX is imported.

Every module takes MLX from here, so that nothing imports it too early:

    from mlx_t5.backend import mx, nn

On a Linux CPU a fast BLAS has to be in the process by then; see `blas`. On macOS and with CUDA
nothing is changed.
"""

from __future__ import annotations

import os
import sys

from mlx_t5 import blas
from mlx_t5.errors import UserError

try:
    _loaded = blas.load(sys.platform)
except ValueError as error:
    raise UserError(str(error)) from None

import mlx.core as mx  # noqa: E402  (only now: the library above must come first)
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

__all__ = [
    "blas_name",
    "cpu_only",
    "device_name",
    "hint",
    "mx",
    "nn",
    "tree_flatten",
]


def cpu_only() -> bool:
    """Whether this machine has no device that MLX can use but the CPU."""
    return not (mx.metal.is_available() or mx.cuda.is_available())


def blas_name() -> str:
    """What multiplies matrices on the CPU: library, version and kernels."""
    return "Accelerate" if sys.platform == "darwin" else _loaded or blas.REFERENCE


def device_name() -> str:
    """What computes, as far as it decides about speed: the GPU, or the CPU, its cores and BLAS."""
    name = str(mx.device_info().get("device_name", "unknown"))
    if mx.default_device().type != mx.cpu:
        return name
    return f"{name}, {os.cpu_count()} cores, {blas_name()}"


def hint(blas_in_use: str, wish: str, cpu: bool) -> str:
    """What to tell the user, or nothing.

    Args:
        blas_in_use: what `blas_name` returns.
        wish: the user's, from the environment; who wants no BLAS is not told to install one.
        cpu: what `cpu_only` returns.
    """
    if blas_in_use != blas.REFERENCE or wish or not cpu:
        return ""
    return (
        "hint: there is no fast BLAS, so MLX computes on one core and about 20 times slower; on "
        "x86-64: pip install -r requirements.txt, elsewhere the system's OpenBLAS is used\n"
    )


if sys.stderr:  # None where it is closed
    sys.stderr.write(hint(blas_name(), os.environ.get(blas.VARIABLE, ""), cpu_only()))
