"""What only holds where MLX computes on the CPU; `T5_DEVICE=cpu` has it do so on any machine."""

import pytest

from mlx_t5.backend import ON_CUDA, cpu_only

cpu_allocation = pytest.mark.skipif(
    not cpu_only(),
    reason="a GPU's buffers are rounded up to pages, and freed only when its kernels have ended",
)


def skip_float32_times_4_bits(bits: int, mode: str = "affine", dtype: str = "float32") -> None:
    """Leaves out what is NaN, or has other bits in every run, with MLX 0.32.4 on CUDA."""
    if ON_CUDA and (bits, mode, dtype) == (4, "affine", "float32"):
        pytest.skip("float32 times weights in 4 bits comes out wrong on CUDA")
