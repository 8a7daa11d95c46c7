"""What must happen before MLX is imported.

Every module takes MLX from here, so that nothing imports it too early:

    from mlx_t5.backend import mx, nn

The CPU wheel of MLX for Linux carries a reference BLAS that runs on one core: a product of two
1024 x 1024 matrices takes 20 times as long as with OpenBLAS, and six rows cost six times as much
as one, so that speculative decoding cannot pay. An OpenBLAS loaded into the process before MLX
takes the place of the bundled one. On macOS and with CUDA nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable


def load_openblas(
    platform: str = sys.platform, loader: Callable[..., object] = ctypes.CDLL
) -> bool:
    """Load OpenBLAS so that an MLX imported afterwards uses it.

    Args:
        platform: as `sys.platform`; only Linux needs the library.
        loader: opens a shared library by name and raises `OSError` if there is none.

    Returns:
        False if this platform could use OpenBLAS and it is not installed, True otherwise.
    """
    if not platform.startswith("linux"):
        return True
    for name in ("libopenblas.so.0", "libopenblas.so"):
        try:
            loader(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


_found = load_openblas()

import mlx.core as mx  # noqa: E402  (only now: the library above must come first)
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

__all__ = [
    "cpu_only",
    "device_name",
    "hint",
    "load_openblas",
    "mx",
    "nn",
    "tree_flatten",
]


def cpu_only() -> bool:
    """Whether this machine has no device that MLX can use but the CPU."""
    return not (mx.metal.is_available() or mx.cuda.is_available())


def device_name() -> str:
    """What computes, as far as it decides about speed: the GPU, or the CPU, its cores and BLAS."""
    name = str(mx.device_info().get("device_name", "unknown"))
    if mx.default_device().type != mx.cpu:
        return name
    return f"{name}, {os.cpu_count()} cores, {'system BLAS' if _found else 'reference BLAS'}"


def hint(found: bool, cpu: bool) -> str:
    """What to tell the user, or nothing.

    Args:
        found: what `load_openblas` returned.
        cpu: what `cpu_only` returns.
    """
    if found or not cpu:
        return ""
    return (
        "hint: OpenBLAS is not installed, so MLX computes on one core and about 20 times slower; "
        "on Debian and Ubuntu: apt install libopenblas0-pthread\n"
    )


if sys.stderr:  # None where it is closed
    sys.stderr.write(hint(_found, cpu_only()))
