"""Estimates the seconds of a step: by a table for the device, corrected by the steps themselves.

No benchmark is run. `Expected` has a table, for kinds of devices and weights, of v(M): the time of
a pass over M positions relative to one over a single position. `StepCosts` corrects the table by
the durations of the steps that decode anyway. The correction is a Gaussian process over the shapes
of steps (Rasmussen and Williams, 2006, chapter 2): a measured shape also corrects similar shapes,
and far from all measured shapes the ratios of the table remain.

Symbols: B rows, M positions, gamma proposals, K measured shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mlx_t5 import blas
from mlx_t5.backend import blas_name, device_info, mx, on_cpu, on_cuda
from mlx_t5.network.ranks import ranks_of

if TYPE_CHECKING:
    from mlx_t5.network.exact import ExactTarget
    from model import T5

Shape: TypeAlias = tuple[int, int, int]  # of a step: B, positions of each row, draft passes

MOST = 15  # maximum of proposals a row; more are hardly ever all accepted
MOST_ON_METAL = 7  # Metal's vector kernel for attention takes 8 queries; the next one is slower


class Device(NamedTuple):
    """The rough speed of a kind of device; only ratios between passes depend on it.

    Attributes:
        layer: fixed seconds of a decoder layer.
        bandwidth: bytes of weights read a second.
        softmax: seconds of sampling per logit.
        grows: whether `layer` grows with the number of positions, as reading does.
    """

    layer: float
    bandwidth: float
    softmax: float = 0.0
    grows: bool = False


# CPU: two cores of an AMD EPYC with MKL; drawing takes 23 ns a logit. CUDA: an H100 takes 5.9 ms
# for the 24 layers of t5-large, whose weights it reads in 0.25 (docs/performance.md). Metal: 19
# kernels a layer of 2.4 to 2.75 us each (mlx#3839); between an M3 (100 GB/s) and an Ultra (800).
CPU = Device(5e-4, 1.7e10, 2.3e-8)
CUDA = Device(2.4e-4, 2e12, grows=True)
METAL = Device(6e-5, 3e11)

# M → time to read and multiply weights for M positions (of all rows), relative to M = 1. Values in
# between are interpolated; beyond the last M the last slope continues.
V: Mapping[str, Mapping[int, float]] = {
    # MKL on 2 cores of an AMD EPYC and of an Intel Xeon, the shapes of t5-small and t5-base.
    "cpu": {1: 1, 2: 1.1, 4: 1.6, 6: 2, 8: 2.3, 16: 2.7, 32: 3.9, 64: 7, 192: 17},
    "cpu without blas": {1: 1, 64: 64},
    # MLX encodes 24 layers in 3.2 to 4.8 ms at M = 1, in 5.2 to 7.8 at 5 (docs/performance.md).
    "cuda": {1: 1, 2: 1.3, 5: 1.5, 8: 1.55, 32: 1.7, 128: 2.5},
    # M3 and later read weights of 4 and 8 bits once for up to 5 rows (mlx#3791, mlx#3839).
    "quantized": {1: 1, 2: 1.1, 4: 1.3, 5: 1.45, 6: 1.8, 8: 2.2, 10: 2.6, 16: 3.9, 32: 3.9, 64: 5},
    # Affine weights on M1 and M2 are read once a row, in tiles from 6 rows on (quantized.cpp).
    "affine before M3": {1: 1, 2: 1.9, 4: 3.6, 5: 4.4, 6: 4.6, 32: 4.6, 64: 6},
    # Weights of fp modes are read once for 5 rows on every chip (mlx#3764).
    "fp before M3": {1: 1, 2: 1.45, 4: 2.4, 5: 2.9, 6: 4.4, 32: 4.6, 64: 6},
    # 16 bits on M3 and later: once up to 5, twice up to 10 (`gemv_wide` in MLX's matmul.cpp).
    "16 bits": {1: 1, 2: 1.1, 5: 1.3, 6: 1.7, 10: 1.9, 11: 2.2, 32: 2.2, 64: 3.5},
    # 16 bits before M3, and float32: the matrix kernel from M = 2 on (mlx#4265; ReDrafter, M1 Max).
    "matrix kernel": {1: 1, 2: 2, 15: 2.2, 32: 2.6, 64: 4},
}


def device_kind(weights: str) -> tuple[Device, str]:
    """Returns the device, and the row of `V` for it and a kind of weights.

    Args:
        weights: the mode of quantisation ("affine", …), or the type if they are not quantised.
    """
    if on_cpu():
        return CPU, "cpu without blas" if blas_name() == blas.REFERENCE else "cpu"
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
    """Returns the maximum of proposals a row for num_draft="auto"."""
    return MOST_ON_METAL if mx.metal.is_available() and not on_cpu() else MOST


class Expected:
    """Seconds of steps by the table; the same on every run on a machine."""

    def __init__(self, target: T5 | ExactTarget, draft: T5 | None = None) -> None:
        """Takes a target, or its `ExactTarget`, and its draft model if there is one."""
        self.width = getattr(target, "width", 0)
        device, row = device_kind(target.weights_read().kind)
        parts = [_parts(model, device) if model else (0.0, 0.0) for model in (target, draft)]
        facts = row, *parts[0], *parts[1], device.softmax * target.config.vocab_size
        # Ranks on different devices must make the same choices, so all use rank 0's table.
        row, *seconds, self.softmax = ranks_of(target).shared(facts)
        self.target, self.draft = tuple(seconds[:2]), tuple(seconds[2:])
        self.v = list(V[row]), list(V[row].values())

    def seconds(self, rows: int, positions: Any, passes: Any, sampled: bool = False) -> Any:
        """Returns the expected seconds of steps.

        Args:
            rows: B.
            positions: positions of each row that the target verifies; a number or an array.
            passes: the draft's passes; a number or an array.
            sampled: whether the rows are sampled, not greedy.
        """
        target = self._pass(self.target, rows * (self.width or positions))
        draft = passes * self._pass(self.draft, rows)
        return target + draft + sampled * self.softmax * rows * (positions + passes)

    def catching_up(self, rows: int, tokens: int) -> float:
        """Returns the extra seconds of a first draft pass that reads `tokens` more a row."""
        more = self._pass(self.draft, rows * (1 + tokens)) - self._pass(self.draft, rows)
        return float(more)

    def _pass(self, model: tuple[float, float], positions: Any) -> Any:
        """Returns the seconds of a model's pass over so many positions of all rows."""
        points, times = self.v
        slope = (times[-1] - times[-2]) / (points[-1] - points[-2])
        beyond = np.maximum(np.subtract(positions, points[-1]), 0)
        fixed, reading = model
        return fixed + reading * (np.interp(positions, points, times) + slope * beyond)


def _parts(model: T5 | ExactTarget, device: Device) -> tuple[float, float]:
    """Returns a pass's seconds over one position: the fixed part, and the part that v(M) scales."""
    read = model.weights_read()
    layers, reading = read.layers * device.layer, read.bytes / device.bandwidth
    return (0.0, layers + reading) if device.grows else (layers, reading)


UNIT = 100.0  # prior variance of the error log(seconds / expected) that all shapes share
SPREAD = 0.15**2  # prior variance of a shape's own error
NOISE = 0.25**2  # variance of a single step's error
SURPRISE = 2 * NOISE**0.5  # larger deviations from the mean are clamped to this
REACH = 6.0  # length scale of the covariance, in positions or draft passes
KNOWN = 3.0  # steps after which a shape's seconds are known
FADE = 0.997  # factor by which a step fades all earlier ones
SHAPES = 32  # maximum of shapes kept
PATIENCE = 16  # steps between two solutions, once a shape is known
GRIDS = 64  # maximum of grids cached


class StepCosts:
    """Seconds of steps, learned from measured steps."""

    def __init__(self, expected: Callable[[int, Any, Any], Any]) -> None:
        """Starts with `expected`, the time of (B, positions, draft passes) in any unit."""
        self.expected = lru_cache(maxsize=512)(lambda *shape: float(expected(*shape)))
        self._expected_grid = expected
        self._seen: set[Shape] = set()
        self._shapes: list[Shape] = []  # K of them
        self._features = np.zeros((0, 4))  # (K, 4) their features
        self._weights: list[float] = []  # faded number of steps of each, times `_scale`
        self._errors: list[float] = []  # mean of log(seconds / expected) of each
        self._scale = 1.0  # grows with every step, which fades all weights relative to it
        self._known: Any = ()  # (K,) posterior mean of the errors
        self._solution: np.ndarray = np.zeros(0)  # (K,) (covariance + noise)^-1 errors
        self._unused = 0  # steps since the solution was computed
        self._grids: dict[int, tuple[Grid, Any]] = {}  # seconds by the current solution

    def note(self, rows: int, positions: int, passes: int, seconds: float) -> None:
        """Learns from a step. The first of a shape is ignored, as it may have compiled kernels."""
        shape = rows, positions, passes
        if shape not in self._seen or seconds <= 0:
            self._seen.add(shape)
            return
        error = math.log(seconds / self.expected(*shape))
        self._scale /= FADE
        if new := shape not in self._shapes:
            self._remember(shape)
        i = self._shapes.index(shape)
        if not new:
            error = min(max(error, self._known[i] - SURPRISE), self._known[i] + SURPRISE)
        self._weights[i] += self._scale
        self._errors[i] += (error - self._errors[i]) * self._scale / self._weights[i]
        self._unused += 1
        if new or self._weights[i] < KNOWN * self._scale or self._unused >= PATIENCE:
            self._solve()

    def is_new(self, grid: Grid, d: int, m: int) -> bool:
        """Whether fewer than `KNOWN` steps, faded, had this shape."""
        shape = grid.rows, int(grid.positions[d, m]), int(grid.passes[d, m])
        if shape not in self._shapes:
            return True
        return self._weights[self._shapes.index(shape)] < KNOWN * self._scale

    def seconds(self, grid: Grid) -> np.ndarray:
        """Returns the (N, N) expected seconds of steps of these shapes."""
        if id(grid) not in self._grids:
            if len(self._grids) == GRIDS:
                self._grids.clear()
            expected = self._expected_grid(grid.rows, grid.positions, grid.passes)
            if self._shapes:
                correction = _covariance(grid.features, self._features) @ self._solution
                expected = expected * np.exp(correction)
            self._grids[id(grid)] = grid, expected
        return self._grids[id(grid)][1]

    def _solve(self) -> None:
        """Computes the posterior of the Gaussian process from the measured errors."""
        self._weights = [weight / self._scale for weight in self._weights]
        self._scale, self._unused = 1.0, 0
        covariance = _covariance(self._features, self._features)
        noise = np.diag(NOISE / np.maximum(self._weights, 1e-3))
        self._solution = np.linalg.solve(covariance + noise, self._errors)
        self._known = (covariance @ self._solution).tolist()
        self._grids.clear()

    def _remember(self, shape: Shape) -> None:
        """Adds a shape; evicts the one with the least weight if there are `SHAPES`."""
        if len(self._shapes) == SHAPES:
            least = self._weights.index(min(self._weights))
            for values in (self._shapes, self._weights, self._errors):
                del values[least]
        self._shapes.append(shape)
        self._weights.append(0.0)
        self._errors.append(0.0)
        self._features = np.array([_features(*shape) for shape in self._shapes])


class Grid(NamedTuple):
    """Shapes of steps of B rows, by the numbers of drafts and of copies.

    Attributes:
        rows: B.
        positions: (N, N) positions of each row that the target verifies.
        passes: (N, N) passes of the draft.
        features: (N, N, 4) features of the shapes.
    """

    rows: int
    positions: np.ndarray
    passes: np.ndarray
    features: np.ndarray


@lru_cache(maxsize=GRIDS)
def grid(
    rows: int, drafts: tuple[int, ...], copies: tuple[int, ...], longest: int = 0, passes: int = 0
) -> Grid:
    """Returns the shapes of steps with at least `longest` proposals and `passes` draft passes."""
    positions = np.maximum(np.maximum.outer(drafts, copies), longest) + 1
    all_passes = np.broadcast_to(np.maximum(drafts, passes)[:, None], positions.shape)
    return Grid(rows, positions, all_passes, _features(rows, positions, all_passes))


def _features(rows: int, positions: Any, passes: Any) -> np.ndarray:
    """Returns coordinates (…, 4) of shapes; shapes close to each other have similar errors."""
    size = np.full(np.shape(positions), math.log2(rows))
    return np.stack([size, positions / REACH, passes / REACH, np.greater(passes, 0)], axis=-1)


def _covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the covariance (…, K) of the errors of shapes a (…, 4) and b (K, 4)."""
    return UNIT + SPREAD * np.exp(-np.abs(a[..., None, :] - b).sum(axis=-1))
