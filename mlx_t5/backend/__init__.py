"""MLX as every module imports it, on an Apple GPU, an NVIDIA GPU or a CPU.

    from mlx_t5.backend import mx, nn

Before MLX is imported, its environment variables are set and, on Linux, a fast BLAS is loaded.
"""

import os

from mlx_t5.backend.blas import REFERENCE_BLAS
from mlx_t5.backend.cuda import announce_kernels, prepare_cuda
from mlx_t5.backend.device import (
    ON_CUDA,
    blas_name,
    cpu_only,
    device_info,
    device_name,
    mx,
    nn,
    on_cpu,
    on_cuda,
    optimizers,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

prepare_cuda(os.environ)
