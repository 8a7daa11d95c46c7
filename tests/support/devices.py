"""What only holds where MLX computes on the CPU; `T5_DEVICE=cpu` has it do so on any machine."""

import pytest

from mlx_t5.backend import cpu_only

cpu_allocation = pytest.mark.skipif(
    not cpu_only(),
    reason="a GPU's buffers are rounded up to pages, and freed only when its kernels have ended",
)
