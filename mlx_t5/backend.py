"""Sets up the environment that MLX expects when it is imported, and then imports MLX.

Every module imports MLX from this one, so that the environment is always set first:

    from mlx_t5.backend import mx, nn

On a Linux CPU a fast BLAS must be loaded before MLX; see `blas`. MLX reads its environment
variables only once.
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

DEVICE = "T5_DEVICE"  # set by the user: cpu or gpu
REHEARSE = "T5_REHEARSE"  # if set, a CPU uses the code paths of GPUs; see `cpu_only`
SETTINGS = MappingProxyType(
    {
        # No TF32 in float32 products (CUDA, M5 and later): it has 10 bits of mantissa.
        "MLX_ENABLE_TF32": "0",
        # cuDNN makes a plan for every exact shape of attention, and raises after 512 of them.
        "MLX_CUDA_USE_CUDNN_SDPA": "0",
        # MLX keeps a CUDA graph for each shape of a pass; ragged batches need more than its 400.
        "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
        # MLX would raise an error if it evicted graphs often, although that only costs time.
        "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    }
)


def prepare(environment: MutableMapping[str, str]) -> None:
    """Sets MLX's environment variables, except those that the user has set."""
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
    """Sets MLX's default device to the user's choice; "" keeps MLX's default.

    Args:
        wish: "cpu", "gpu" or "".
        choose: sets MLX's device, and raises `ValueError` if there is no such device.

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
    """Returns whether MLX computes on the CPU: there is no GPU, or the user chose the CPU."""
    return mx.default_device().type == mx.cpu


def on_cuda() -> bool:
    """Returns whether MLX computes on an NVIDIA GPU."""
    return mx.cuda.is_available() and not on_cpu()  # is_available only says how MLX was built


def cpu_only() -> bool:
    """Returns whether to use the CPU's code paths: `on_cpu()`, unless `T5_REHEARSE` is set.

    `T5_REHEARSE` makes a CPU use a GPU's code paths: compiled layers, padded sources, memory
    checks, and passes that start before Python has read the previous pass's token (early_pass.py).
    The default type stays float32: CPUs are slow with other types.
    """
    return on_cpu() and not os.environ.get(REHEARSE)


def device_info() -> dict[str, Any]:
    """Returns MLX's facts about the device.

    On a CPU with `T5_REHEARSE` set, adds facts about memory, as Metal would report them.
    """
    facts = dict(mx.device_info())
    if on_cpu() and not cpu_only():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        metal = {"memory_size": memory, "max_recommended_working_set_size": memory * 3 // 4}
        facts = metal | facts
    return facts


def blas_name() -> str:
    """Returns the name of the CPU's BLAS, with its version and kernels if they are known."""
    return "Accelerate" if sys.platform == "darwin" else _loaded or blas.REFERENCE


def device_name() -> str:
    """Returns the device's name; for a CPU, also the number of its cores and its BLAS."""
    name = str(mx.device_info().get("device_name", "unknown"))
    if not on_cpu():
        return name
    return f"{name}, {os.cpu_count()} cores, {blas_name()}"


def hint(blas_in_use: str, wish: str, cpu: bool) -> str:
    """Returns advice to install a faster BLAS, or "".

    Args:
        blas_in_use: the result of `blas_name`.
        wish: the user's choice of a BLAS, from the environment; "" if there is none.
        cpu: the result of `on_cpu`.
    """
    if blas_in_use != blas.REFERENCE or wish or not cpu:
        return ""
    return (
        "hint: there is no fast BLAS, so MLX computes on one core and about 20 times slower; on "
        "x86-64: pip install -r requirements.txt, elsewhere the system's OpenBLAS is used\n"
    )


def prepare_cuda(environment: MutableMapping[str, str]) -> None:
    """Prepares an NVIDIA GPU for computing, see cuda.py; does nothing on other devices.

    Raises:
        UserError: MLX chose a GPU, but there is none.
    """
    if on_cuda():
        facts = mx.device_info()
        try:
            cuda.require_gpu(facts)
        except ValueError as error:
            raise UserError(str(error)) from None
        cuda.keep_kernels(environment, mx.__version__, facts)


prepare_cuda(os.environ)
ON_CUDA = on_cuda()  # the device does not change


@cache
def announce_kernels() -> None:
    """Prints a line on standard error, at the first call, if kernels are going to be compiled."""
    if on_cuda() and cuda.kernels_to_come(os.environ, mx.__version__):
        print(cuda.COMPILING, file=sys.stderr, flush=True)


if sys.stderr:  # None if standard error is closed
    sys.stderr.write(hint(blas_name(), os.environ.get(blas.VARIABLE, ""), on_cpu()))
