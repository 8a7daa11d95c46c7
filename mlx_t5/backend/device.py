"""Imports MLX with the environment that it expects, and tells what computes.

Every module imports MLX from `mlx_t5.backend`, so that the environment is always set first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from mlx_t5.backend.blas import BLAS, REFERENCE_BLAS, hint, load_blas
from mlx_t5.errors import UserError, log
from mlx_t5.installation import require_packages

DEVICE = "T5_DEVICE"  # set by the user: cpu or gpu
REHEARSE = "T5_REHEARSE"  # if set, a CPU uses the code paths of GPUs; see `cpu_only`
SETTINGS = {
    # No TF32 in float32 products (CUDA, M5 and later): it has 10 bits of mantissa.
    "MLX_ENABLE_TF32": "0",
    # cuDNN makes a plan for every exact shape of attention, and raises after 512 of them.
    "MLX_CUDA_USE_CUDNN_SDPA": "0",
    # MLX keeps a CUDA graph for each shape of a pass; ragged batches need more than its 400.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
    # MLX would raise an error if it evicted graphs often, although that only costs time.
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}

require_packages("mlx", "numpy")

# On Linux, MLX would not see the variables, and would keep its own BLAS.
_too_late = "mlx.core" in sys.modules and sys.platform.startswith("linux")
for _name, _value in SETTINGS.items():  # MLX reads its environment variables only once
    os.environ.setdefault(_name, _value)  # the user's own values stay
_loaded = None if _too_late else load_blas(sys.platform)

import mlx.core as mx  # noqa: E402  (only now: the library above must come first)
from mlx import nn as nn  # noqa: E402
from mlx import optimizers as optimizers  # noqa: E402
from mlx.utils import tree_flatten as tree_flatten  # noqa: E402
from mlx.utils import tree_map as tree_map  # noqa: E402
from mlx.utils import tree_unflatten as tree_unflatten  # noqa: E402


def choose_device(requested: str, choose: Callable[[Any], None] = mx.set_default_device) -> None:
    """Sets MLX's default device; "" keeps MLX's own choice."""
    if requested not in ("", "cpu", "gpu"):
        raise UserError(f"{DEVICE} must be cpu or gpu, not {requested:.40}")
    try:
        if requested:
            choose(mx.cpu if requested == "cpu" else mx.gpu)
    except ValueError:
        raise UserError(f"{DEVICE} is {requested}, and MLX has none here") from None


choose_device(os.environ.get(DEVICE, ""))


def on_cpu() -> bool:
    """Whether MLX computes on the CPU: there is no GPU, or the user chose the CPU."""
    return mx.default_device().type == mx.cpu


def on_cuda() -> bool:
    return mx.cuda.is_available() and not on_cpu()  # is_available only says how MLX was built


def cpu_only() -> bool:
    """Whether to use the CPU's code paths: `on_cpu()`, unless `T5_REHEARSE` is set.

    `T5_REHEARSE` makes a CPU use a GPU's code paths: compiled layers, padded sources, memory
    checks, and passes that start before Python has read the previous pass's token.
    The default type stays float32, because CPUs are slow with other types.
    """
    return on_cpu() and not os.environ.get(REHEARSE)


def device_info() -> dict[str, Any]:
    """MLX's facts about the device; with `T5_REHEARSE` a CPU adds memory, as Metal reports it."""
    facts = dict(mx.device_info())
    if on_cpu() and not cpu_only():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        metal = {"memory_size": memory, "max_recommended_working_set_size": memory * 3 // 4}
        facts = metal | facts
    return facts


def blas_name() -> str:
    return "Accelerate" if sys.platform == "darwin" else _loaded or REFERENCE_BLAS


def device_name() -> str:
    """The device's name; for a CPU, also the number of its cores and its BLAS."""
    name = str(mx.device_info().get("device_name", "unknown"))
    if not on_cpu():
        return name
    return f"{name}, {os.cpu_count()} cores, {blas_name()}"


ON_CUDA = on_cuda()  # the device does not change

if _too_late:
    log("hint: import from mlx_t5 before mlx; now a fast BLAS and MLX's variables come too late")
elif advice := hint(blas_name(), os.environ.get(BLAS, ""), on_cpu()):
    log(advice)
