"""Estimates the seconds of a step from a table for the device, corrected by measured steps.

No benchmark is run. For each kind of device and weights, the table `PASS_TIMES` has v(M): the time
to read and multiply the weights for M positions, relative to a single position. Measured decoding
steps correct the estimates.

Symbols: B rows, M positions, gamma proposals, N values of gamma that are compared.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np

from mlx_t5.backend import REFERENCE_BLAS, blas_name, device_info, mx, on_cpu, on_cuda
from mlx_t5.model import T5
from mlx_t5.network.exact import WIDTHS
from mlx_t5.network.interface import Target, WeightsRead

MOST = 15  # maximum number of proposals per row; more are hardly ever all accepted
NUMBERS = np.array((*range(9), 10, 12, MOST))  # the numbers of proposals that are compared

# A measured step corrects its number of proposals by RATE of the deviation, and the next number by
# RATE * NEAR. The deviation is clamped, as a step may have to wait for other programs. Numbers that
# are not measured return to the table's ratios by FORGET, or one slow step could rule them out.
RATE, NEAR, CLAMP, FORGET = 0.1, 0.7, 0.5, 0.03


class Device(NamedTuple):
    """The rough speed of a kind of device, from which the seconds of passes are estimated.

    Attributes:
        layer: seconds of a decoder layer for one position, without the time to read its weights.
        bandwidth: bytes of weights read per second.
        softmax: seconds of sampling per logit.
        layer_grows: whether `layer` is multiplied by v(M) in a pass over M positions. The time to
            read the weights is always multiplied by v(M).
    """

    layer: float
    bandwidth: float
    softmax: float = 0.0
    layer_grows: bool = False


# CPU: two cores of an AMD EPYC with MKL; sampling takes 16 ns per logit. CUDA: an H100 takes 5.9 ms
# for the 24 layers of t5-large, and 0.25 ms to read their weights (docs/performance.md). Metal: a
# layer has 19 kernels of 2.4 to 2.75 us each (mlx#3839); the bandwidth lies between an M3's
# (100 GB/s) and an Ultra's (800 GB/s).
CPU = Device(5e-4, 1.7e10, 1.6e-8)
CUDA = Device(2.4e-4, 2e12, layer_grows=True)
METAL = Device(6e-5, 3e11)

# M → time to read and multiply weights for M positions, counted over all rows, relative to M = 1.
# Values in between are interpolated; beyond the last M the last slope continues.
PASS_TIMES: dict[str, dict[int, float]] = {
    # MKL on 2 cores of an AMD EPYC and of an Intel Xeon, the shapes of t5-small and t5-base.
    "cpu": {1: 1, 2: 1.15, 3: 1.65, 4: 2, 5: 2.2, 8: 2.5, 16: 3.2, 32: 5, 64: 8.2, 192: 20},
    "cpu without blas": {1: 1, 64: 64},
    # MLX encodes 24 layers in 3.2 to 4.8 ms for M = 1, in 5.2 to 7.8 for 5 (docs/performance.md).
    "cuda": {1: 1, 2: 1.3, 5: 1.5, 8: 1.55, 32: 1.7, 128: 2.5},
    # M3 and later read weights of 4 and 8 bits once for up to 5 rows (mlx#3791, mlx#3839).
    "quantized": {1: 1, 2: 1.1, 4: 1.3, 5: 1.45, 6: 1.8, 8: 2.2, 10: 2.6, 16: 3.9, 32: 3.9, 64: 5},
    # M1 and M2 read affine weights once per row, and from 6 rows on in tiles (quantized.cpp).
    "affine before M3": {1: 1, 2: 1.9, 4: 3.6, 5: 4.4, 6: 4.6, 32: 4.6, 64: 6},
    # mxfp4, mxfp8 and nvfp4 weights are read once for 5 rows on every chip (mlx#3764).
    "fp before M3": {1: 1, 2: 1.45, 4: 2.4, 5: 2.9, 6: 4.4, 32: 4.6, 64: 6},
    # M3 and later read 16-bit weights once for 5 rows, twice for 10 (`gemv_wide` in MLX's matmul).
    "16 bits": {1: 1, 2: 1.1, 5: 1.3, 6: 1.7, 10: 1.9, 11: 2.2, 32: 2.2, 64: 3.5},
    # For float32, and for 16 bits before M3, from M = 2 on (mlx#4265; ReDrafter, M1 Max).
    "matrix kernel": {1: 1, 2: 2, 15: 2.2, 32: 2.6, 64: 4},
}


def device_kind(weights: str) -> tuple[Device, str]:
    """Returns the device, and the key in `PASS_TIMES` for the device and this kind of weights.

    Args:
        weights: the mode of quantization ("affine", …), or the type of unquantized weights.
    """
    if on_cpu():
        return CPU, "cpu without blas" if blas_name() == REFERENCE_BLAS else "cpu"
    if on_cuda():
        return CUDA, "cuda"
    generation = re.search(r"applegpu_g(\d+)", str(device_info().get("architecture", "")))
    new = generation is None or int(generation[1]) >= 15  # M3
    if weights == "float32" or ("float" in weights and not new):
        return METAL, "matrix kernel"
    if new:
        return METAL, "16 bits" if "float" in weights else "quantized"
    return METAL, "affine before M3" if weights == "affine" else "fp before M3"


def most_proposals() -> int:
    """Returns the maximum number of proposals per row for num_draft="auto"."""
    # Metal's vector kernel for attention has up to 8 queries; more are slower.
    return 7 if mx.metal.is_available() and not on_cpu() else MOST


class StepCosts:
    """Estimates the seconds of steps from `PASS_TIMES`, corrected by measured steps.

    For each number of proposals, drafted or not, and numbers of rows of the same bit length (such
    as 4 to 7), a moving average follows the error log(measured / expected). Other numbers of
    proposals follow it too, but less.
    """

    def __init__(self, target: Target, draft: T5 | None = None) -> None:
        """Starts with a target and a draft model; None without a draft."""
        self.target, self.draft = target.weights_read(), draft and draft.weights_read()
        self.device, row = device_kind(self.target.kind)
        self.v = np.array(list(PASS_TIMES[row].items())).T
        self.width, self.softmax = target.width, self.device.softmax * target.config.vocab_size
        # Exact decoding pads passes to the least of its widths first, whatever its target then has.
        self.most = WIDTHS[0] - 1 if self.width else most_proposals()
        self.errors, self.seen = dict[int, np.ndarray](), set[tuple[int, int, int]]()

    def expected(self, rows: int, positions: Any, draft_passes: Any, sampled: bool = False) -> Any:
        """Returns the seconds of steps by `PASS_TIMES` alone, so that all runs on a machine agree.

        Args:
            rows: number of rows.
            positions: how many positions of each row the target verifies; a number or an array.
            draft_passes: how many passes the draft makes; a number or an array.
            sampled: whether the rows are sampled, not greedy.
        """
        target_pass = self._pass(self.target, rows * (self.width or positions))
        draft_pass = self._pass(self.draft, rows) if self.draft else 0.0
        seconds = target_pass + draft_passes * draft_pass
        if sampled:
            seconds = seconds + self.softmax * rows * (positions + draft_passes)
        return seconds

    def _pass(self, weights: WeightsRead, positions: Any) -> Any:
        (*_, m1, m2), (*_, v1, v2) = self.v
        v = np.interp(positions, *self.v) + np.maximum(positions - m2, 0) * (v2 - v1) / (m2 - m1)
        layers, reading = weights.layers * self.device.layer, weights.bytes / self.device.bandwidth
        return (layers + reading) * v if self.device.layer_grows else layers + reading * v

    def seconds(self, rows: int, measured: bool) -> np.ndarray:
        """Returns the seconds (2, N) of steps that only copy, and of steps that draft.

        `measured` is whether to correct the table by measured steps. More proposals than are
        allowed take infinitely long.
        """
        table = self.expected(rows, NUMBERS + 1, np.outer((0, 1), NUMBERS), not measured)
        errors = self.errors.get(rows.bit_length(), 0.0) if measured else 0.0
        return np.where(self.most < NUMBERS, np.inf, table * np.exp(errors))

    def update(self, rows: int, gamma: int, draft_passes: int, seconds: float) -> None:
        """Learns from a step with gamma proposals per row, if gamma is one of `NUMBERS`.

        The first step with about the same `rows`, the same `gamma` and the same `draft_passes` is
        ignored, as it may have compiled kernels.
        """
        shape = rows.bit_length(), gamma, draft_passes
        is_first = shape not in self.seen
        self.seen.add(shape)
        if is_first or gamma not in NUMBERS or seconds <= 0:
            return
        error = math.log(seconds / self.expected(rows, gamma + 1, draft_passes))
        errors = self.errors.setdefault(shape[0], np.full((2, len(NUMBERS)), error))
        own = errors[1 if draft_passes else 0]  # of steps that draft, or of steps that do not
        n = int(NUMBERS.searchsorted(gamma))
        deviation = min(max(error - own[n], -CLAMP), CLAMP)
        own += RATE * deviation * NEAR ** abs(NUMBERS - gamma)  # near numbers learn from it, too
        errors += FORGET * (own[n] - errors)
