"""Says on which devices tests run; `T5_DEVICE=cpu` makes MLX compute on the CPU."""

import functools
import os
import re

import pytest

from mlx_t5.backend import ON_CUDA, blas_name, cpu_only, mx, on_cpu

REFUSAL = "exact decoding is not possible here: this device rounds a row differently by its place"

cpu_allocation = pytest.mark.skipif(
    mx.metal.is_available() or not cpu_only(),  # Metal's allocator serves a Mac's CPU as well
    reason="a GPU's buffers are rounded up to pages, and freed only when its kernels have ended",
)


def skip_narrow_4_bits(bits: int, mode: str = "affine") -> None:
    """Skips products of 64 inputs in 4 bits, which are NaN with MLX 0.32.4 on CUDA."""
    if ON_CUDA and (bits, mode) == (4, "affine"):
        pytest.skip("weights of 64 inputs in 4 bits come out wrong on CUDA")


def exact_or_refused(test):
    """Decorates a test of exact decoding, which also passes if the device refuses it."""

    @functools.wraps(test)
    def either(*args, **kwargs):
        try:
            test(*args, **kwargs)
        except Exception as error:
            if not is_refusal(error):
                raise

    return either


def is_refusal(error: Exception) -> bool:
    """Returns whether an error refuses exact decoding on a device that may refuse it."""
    # Intel's and AMD's processors decode exactly with the kernels that MKL chooses by default.
    kernels = re.match("MKL .*(AVX-512|general)", blas_name()) and on_cpu()
    keeps = kernels and not os.environ.keys() & {"MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"}
    return REFUSAL in str(error) and not keeps
