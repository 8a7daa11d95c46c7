"""Estimates the seconds of a step from a table for the device, corrected by measured steps.

No benchmark is run. For each kind of device and weights, the table `PASS_TIMES` has v(M): the time
to read and multiply the weights for M positions, relative to a single position. `Expected`
estimates from this table, and `StepCosts` corrects the estimates by the measured seconds of
ordinary decoding steps.

Symbols: B rows, M positions, gamma proposals, N values of gamma that are compared.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mlx_t5.backend import REFERENCE_BLAS, blas_name, device_info, mx, on_cpu, on_cuda

if TYPE_CHECKING:
    from mlx_t5.network.interface import Target
    from model import T5

Shape: TypeAlias = tuple[int, int, int]  # of a step: B, gamma, draft passes

MOST = 15  # maximum number of proposals per row; more are hardly ever all accepted
NUMBERS = (*range(9), 10, 12, MOST)  # the numbers of proposals that are compared
MOST_ON_METAL = 7  # Metal's vector kernel for attention has up to 8 queries; more are slower


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
PASS_TIMES: Mapping[str, Mapping[int, float]] = {
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
    if weights == "float32" or (not new and weights in ("float16", "bfloat16")):
        return METAL, "matrix kernel"
    if weights in ("float16", "bfloat16"):
        return METAL, "16 bits"
    old = "affine" if weights == "affine" else "fp"
    return METAL, "quantized" if new else f"{old} before M3"


def most_proposals() -> int:
    """Returns the maximum number of proposals per row for num_draft="auto"."""
    return MOST_ON_METAL if mx.metal.is_available() and not on_cpu() else MOST


class Expected:
    """Estimates how long steps take; uses only `PASS_TIMES`, so all runs on a machine agree."""

    def __init__(self, target: Target, draft: T5 | None = None) -> None:
        """Starts with a target and a draft model; None without a draft."""
        self.width = target.width
        device, row = device_kind(target.weights_read().kind)
        self.target = _parts(target, device)
        self.draft = _parts(draft, device) if draft else (0.0, 0.0)
        self.softmax = device.softmax * target.config.vocab_size
        self.v = list(PASS_TIMES[row]), list(PASS_TIMES[row].values())

    def seconds(self, rows: int, positions: Any, passes: Any, sampled: bool = False) -> Any:
        """Returns the expected seconds of steps.

        Args:
            rows: number of rows.
            positions: how many positions of each row the target verifies; a number or an array.
            passes: how many passes the draft makes; a number or an array.
            sampled: whether the rows are sampled, not greedy.
        """
        target = self._pass(self.target, rows * (self.width or positions))
        draft = passes * self._pass(self.draft, rows)
        return target + draft + sampled * self.softmax * rows * (positions + passes)

    def catching_up(self, rows: int, tokens: int) -> float:
        """Returns the extra seconds of a draft that first reads `tokens` more tokens per row."""
        return float(self._pass(self.draft, rows * tokens))

    def _pass(self, model: tuple[float, float], positions: Any) -> Any:
        """Returns a pass's seconds for `positions` positions; `model` is a result of `_parts`."""
        points, times = self.v
        slope = (times[-1] - times[-2]) / (points[-1] - points[-2])
        beyond = np.maximum(np.subtract(positions, points[-1]), 0)
        fixed, reading = model
        return fixed + reading * (np.interp(positions, points, times) + slope * beyond)


def _parts(model: Target, device: Device) -> tuple[float, float]:
    """Returns the seconds of a pass over one position, in two parts.

    For a pass over M positions, the first part stays the same, and the second part is multiplied by
    v(M) from `PASS_TIMES`.
    """
    weights = model.weights_read()
    layers, reading = weights.layers * device.layer, weights.bytes / device.bandwidth
    return (0.0, layers + reading) if device.layer_grows else (layers, reading)


UNIT = 100.0  # prior variance of the error of all steps
DRAFTING = 0.15**2  # prior variance of the additional error of the steps that draft
SHAPE = 0.12**2  # prior variance of the additional error of a single shape
NOISE = 0.25**2  # variance of a single step's deviation
SURPRISE = 2 * NOISE**0.5  # larger deviations are clamped to this
DRIFT = 5e-4  # variance that each step adds to its errors, so that old steps count less


class ErrorPart:
    """The mean and variance of one part of a step's error; `StepCosts` explains the parts."""

    def __init__(self, variance: float) -> None:
        """Starts with the variance that is assumed before the first measured step."""
        self.prior = self.variance = variance
        self.mean = 0.0


class StepCosts:
    """Estimates the seconds of steps from expected costs, corrected by measured steps.

    The error log(seconds / expected) of a step is the sum of three parts: one for all steps, one
    for all steps that draft, and one for all steps of the same shape. Two steps have the same shape
    if they have the same number of proposals, if both or neither of them draft, and if their
    numbers of rows have the same bit length, such as 4 to 7 rows.

    Each measured step corrects the parts in proportion to their variances. This is a Kalman filter
    (https://en.wikipedia.org/wiki/Kalman_filter) that neglects the covariances.
    """

    def __init__(self, expected: Callable[[int, Any, Any], Any], most: int) -> None:
        """Starts with a function like `Expected.seconds` and the maximum number of proposals."""
        self.numbers = [n for n in NUMBERS if n <= most]
        self._function = expected
        self._expected: dict[int, list[list[float]]] = {}  # B → (2, N) expected seconds
        self._all, self._drafting = ErrorPart(UNIT), ErrorPart(DRAFTING)
        self._own: dict[Any, ErrorPart] = defaultdict(lambda: ErrorPart(SHAPE))
        self._seen: set[Shape] = set()

    def seconds(self, rows: int) -> list[list[float]]:
        """Returns the seconds (2, N) of steps that only copy, and of steps that draft.

        There are N numbers of proposals, `self.numbers`. A step that drafts 0 tokens gets infinite
        seconds, so that it is never chosen.
        """
        if rows not in self._expected:
            passes = np.outer((0, 1), self.numbers)
            expected = np.array(self._function(rows, 1 + np.array(self.numbers), passes))
            expected[1, 0] = np.inf
            self._expected[rows] = expected.tolist()
        size, own = rows.bit_length(), self._own
        common = self._all.mean, self._all.mean + self._drafting.mean
        return [
            [s * math.exp(common[d] + own[size, d, n].mean) for n, s in enumerate(expected)]
            for d, expected in enumerate(self._expected[rows])
        ]

    def note(self, rows: int, gamma: int, passes: int, seconds: float) -> None:
        """Learns from a step with gamma proposals per row, if `numbers` contains gamma.

        The first step with the same `rows`, `gamma` and `passes` is ignored, as it may have
        compiled kernels.
        """
        shape = rows, gamma, passes
        if gamma not in self.numbers or seconds <= 0 or shape not in self._seen:
            self._seen.add(shape)
            return
        drafts, n = int(passes > 0), self.numbers.index(gamma)
        parts = [self._all, self._drafting, self._own[rows.bit_length(), drafts, n]]
        parts = parts if passes else parts[::2]
        if rows not in self._expected:
            self.seconds(rows)
        error = math.log(seconds / self._expected[rows][drafts][n])
        error -= sum(part.mean for part in parts)
        if self._all.variance < NOISE:
            error = min(max(error, -SURPRISE), SURPRISE)
        variance = NOISE + sum(part.variance for part in parts)
        for part in parts:
            share = part.variance / variance
            part.mean += share * error
            part.variance = min(part.variance * (1 - share) + DRIFT, part.prior)
