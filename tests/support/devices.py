"""What only holds on some devices; `T5_DEVICE=cpu` has MLX compute on the CPU of any machine."""

import functools
import os
import re
from collections.abc import Callable

import pytest

from mlx_t5.backend import ON_CUDA, blas_name, cpu_only, mx, on_cpu

REFUSAL = "exact decoding is not possible here: this device rounds a row differently by its place"

cpu_allocation = pytest.mark.skipif(
    mx.metal.is_available() or not cpu_only(),  # Metal's allocator serves a Mac's CPU as well
    reason="a GPU's buffers are rounded up to pages, and freed only when its kernels have ended",
)


def skip_narrow_4_bits(bits: int, mode: str = "affine") -> None:
    """Leaves out products of 64 inputs in 4 bits, which are NaN with MLX 0.32.4 on CUDA."""
    if ON_CUDA and (bits, mode) == (4, "affine"):
        pytest.skip("weights of 64 inputs in 4 bits come out wrong on CUDA")


def exact_or_refused(test: Callable[..., None]) -> Callable[..., None]:
    """A test of exact decoding; where the device cannot keep the promise, of its refusal."""

    @functools.wraps(test)
    def either(*args, **kwargs):
        try:
            test(*args, **kwargs)
        except Exception as error:
            if not is_refusal(error):
                raise

    return either


def is_refusal(error: Exception) -> bool:
    """Whether an error is the refusal of exact decoding, on a device where it may be."""
    # Intel's and AMD's processors keep the promise with the kernels that MKL takes by itself.
    kernels = re.match("MKL .*(AVX-512|general)", blas_name()) and on_cpu()
    keeps = kernels and not os.environ.keys() & {"MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"}
    return REFUSAL in str(error) and not keeps
