"""What only holds where MLX computes on the CPU; `T5_DEVICE=cpu` has it do so on any machine."""

import pytest

from mlx_t5.backend import ON_CUDA, cpu_only, mx

cpu_allocation = pytest.mark.skipif(
    mx.metal.is_available() or not cpu_only(),  # Metal's allocator serves a Mac's CPU as well
    reason="a GPU's buffers are rounded up to pages, and freed only when its kernels have ended",
)


def skip_narrow_4_bits(bits: int, mode: str = "affine") -> None:
    """Leaves out products of 64 inputs in 4 bits, which are NaN with MLX 0.32.4 on CUDA."""
    if ON_CUDA and (bits, mode) == (4, "affine"):
        pytest.skip("weights of 64 inputs in 4 bits come out wrong on CUDA")
