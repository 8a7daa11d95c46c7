"""What must happen before MLX is imported.

Every module takes MLX from here, so that nothing imports it too early:

    from mlx_t5.backend import mx, nn

On a Linux CPU a fast BLAS has to be in the process by then; see `blas`. MLX also reads some
settings once, from the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping
from functools import cache
from types import MappingProxyType
from typing import Any

from mlx_t5 import blas, cuda
from mlx_t5.errors import UserError

DEVICE = "T5_DEVICE"  # the user's wish: cpu or gpu
REHEARSE = "T5_REHEARSE"  # if set, a CPU runs what only GPUs run; see `cpu_only`
SETTINGS = MappingProxyType(
    {
        # float32 products are those of float32: TF32 has 10 bits of mantissa (CUDA, M5 and later).
        "MLX_ENABLE_TF32": "0",
        # cuDNN makes a plan for every exact shape of attention, and raises after 512 of them.
        "MLX_CUDA_USE_CUDNN_SDPA": "0",
        # A CUDA graph for every shape of a pass: the usual 400 do not suffice for ragged batches,
        "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
        # and more of them than are kept cost time, but are no error.
        "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    }
)


def prepare(environment: MutableMapping[str, str]) -> None:
    """Puts MLX's settings where it reads them; what the user has set stays."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


prepare(os.environ)
try:
    _loaded = blas.load(sys.platform)
except ValueError as error:
    raise UserError(str(error)) from None

import mlx.core as mx  # noqa: E402  (only now: the library above must come first)
from mlx import nn as nn  # noqa: E402
from mlx import optimizers as optimizers  # noqa: E402
from mlx.utils import tree_flatten as tree_flatten  # noqa: E402
from mlx.utils import tree_map as tree_map  # noqa: E402
from mlx.utils import tree_unflatten as tree_unflatten  # noqa: E402


def choose_device(wish: str, choose: Callable[[Any], None] = mx.set_default_device) -> None:
    """Has MLX compute where the user wishes; an empty wish leaves it its own choice.

    Args:
        wish: "cpu", "gpu" or "".
        choose: tells MLX, and raises `ValueError` if it has no such device.

    Raises:
        UserError: there is no such device.
    """
    if wish not in ("", "cpu", "gpu"):
        raise UserError(f"{DEVICE} must be cpu or gpu, not {wish:.40}")
    try:
        if wish:
            choose(mx.cpu if wish == "cpu" else mx.gpu)
    except ValueError:
        raise UserError(f"{DEVICE} is {wish}, and MLX has none here") from None


choose_device(os.environ.get(DEVICE, ""))


def on_cpu() -> bool:
    """Whether MLX computes on the CPU: it has no GPU here, or was told to leave it alone."""
    return mx.default_device().type == mx.cpu


def on_cuda() -> bool:
    """Whether MLX computes on an NVIDIA GPU."""
    return mx.cuda.is_available() and not on_cpu()  # the first says how MLX was built


def cpu_only() -> bool:
    """Whether things are done as on the CPU: `on_cpu`, unless this rehearses a GPU.

    A rehearsal takes the paths that only GPUs take: compiled steps, padded sources, passes that
    begin early, checks of memory. Types stay those of the CPU, which is slow in others.
    """
    return on_cpu() and not os.environ.get(REHEARSE)


def device_info() -> dict[str, Any]:
    """What MLX says of the device; a rehearsal adds what Metal says of its memory."""
    facts = dict(mx.device_info())
    if on_cpu() and not cpu_only():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        metal = {"memory_size": memory, "max_recommended_working_set_size": memory * 3 // 4}
        facts = metal | facts
    return facts


def blas_name() -> str:
    """What multiplies matrices on the CPU: library, version and kernels."""
    return "Accelerate" if sys.platform == "darwin" else _loaded or blas.REFERENCE


def device_name() -> str:
    """What computes, as far as it decides about speed: the GPU, or the CPU, its cores and BLAS."""
    name = str(mx.device_info().get("device_name", "unknown"))
    if not on_cpu():
        return name
    return f"{name}, {os.cpu_count()} cores, {blas_name()}"


def hint(blas_in_use: str, wish: str, cpu: bool) -> str:
    """What to tell the user, or nothing.

    Args:
        blas_in_use: what `blas_name` returns.
        wish: the user's, from the environment; who wants no BLAS is not told to install one.
        cpu: what `on_cpu` returns.
    """
    if blas_in_use != blas.REFERENCE or wish or not cpu:
        return ""
    return (
        "hint: there is no fast BLAS, so MLX computes on one core and about 20 times slower; on "
        "x86-64: pip install -r requirements.txt, elsewhere the system's OpenBLAS is used\n"
    )


def prepare_cuda(environment: MutableMapping[str, str]) -> None:
    """See cuda.py; nothing where no NVIDIA GPU is to compute.

    Raises:
        UserError: there is none.
    """
    if on_cuda():
        facts = mx.device_info()
        try:
            cuda.require_gpu(facts)
        except ValueError as error:
            raise UserError(str(error)) from None
        cuda.keep_kernels(environment, mx.__version__, facts)


prepare_cuda(os.environ)
ON_CUDA = on_cuda()  # as it stays


@cache
def announce_kernels() -> None:
    """Says on standard error, the first time, if kernels are going to be compiled."""
    if on_cuda() and cuda.kernels_to_come(os.environ, mx.__version__):
        print(cuda.COMPILING, file=sys.stderr, flush=True)


if sys.stderr:  # None where it is closed
    sys.stderr.write(hint(blas_name(), os.environ.get(blas.VARIABLE, ""), on_cpu()))
