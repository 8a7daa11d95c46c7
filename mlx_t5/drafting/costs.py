"""Estimates the seconds of a step from a table for the device, corrected by measured steps.

No benchmark is run. For each kind of device and weights, `Expected` has a table of v(M): the time
of a pass over M positions, relative to a pass over a single position. `StepCosts` corrects the
table by the durations of ordinary decoding steps. The correction is a Gaussian process over the
shapes of steps (Rasmussen and Williams, 2006, chapter 2): a measured shape also corrects similar
shapes, and shapes far from all measured ones keep the ratios of the table.

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

MOST = 15  # maximum of proposals per row; more are hardly ever all accepted
MOST_ON_METAL = 7  # Metal's vector kernel for attention has up to 8 queries; more are slower


class Device(NamedTuple):
    """The rough speed of a kind of device, by which the seconds of passes are compared.

    Attributes:
        layer: fixed seconds of a decoder layer.
        bandwidth: bytes of weights read a second.
        softmax: seconds of sampling per logit.
        grows: whether `layer` grows with the number of positions, as the time to read weights does.
    """

    layer: float
    bandwidth: float
    softmax: float = 0.0
    grows: bool = False


# CPU: two cores of an AMD EPYC with MKL; sampling takes 23 ns per logit. CUDA: an H100 takes 5.9 ms
# for the 24 layers of t5-large, and 0.25 ms to read their weights (docs/performance.md). Metal: a
# layer has 19 kernels of 2.4 to 2.75 us each (mlx#3839); the bandwidth lies between an M3's
# (100 GB/s) and an Ultra's (800 GB/s).
CPU = Device(5e-4, 1.7e10, 2.3e-8)
CUDA = Device(2.4e-4, 2e12, grows=True)
METAL = Device(6e-5, 3e11)

# M → time to read and multiply weights for M positions, counted over all rows, relative to M = 1.
# Values in between are interpolated; beyond the last M the last slope continues.
V: Mapping[str, Mapping[int, float]] = {
    # MKL on 2 cores of an AMD EPYC and of an Intel Xeon, the shapes of t5-small and t5-base.
    "cpu": {1: 1, 2: 1.1, 4: 1.6, 6: 2, 8: 2.3, 16: 2.7, 32: 3.9, 64: 7, 192: 17},
    "cpu without blas": {1: 1, 64: 64},
    # MLX encodes 24 layers in 3.2 to 4.8 ms for M = 1, in 5.2 to 7.8 for 5 (docs/performance.md).
    "cuda": {1: 1, 2: 1.3, 5: 1.5, 8: 1.55, 32: 1.7, 128: 2.5},
    # M3 and later read weights of 4 and 8 bits once for up to 5 rows (mlx#3791, mlx#3839).
    "quantized": {1: 1, 2: 1.1, 4: 1.3, 5: 1.45, 6: 1.8, 8: 2.2, 10: 2.6, 16: 3.9, 32: 3.9, 64: 5},
    # M1 and M2 read affine weights once per row, and from 6 rows on in tiles (quantized.cpp).
    "affine before M3": {1: 1, 2: 1.9, 4: 3.6, 5: 4.4, 6: 4.6, 32: 4.6, 64: 6},
    # Weights of fp modes are read once for 5 rows on every chip (mlx#3764).
    "fp before M3": {1: 1, 2: 1.45, 4: 2.4, 5: 2.9, 6: 4.4, 32: 4.6, 64: 6},
    # M3 and later read 16-bit weights once for 5 rows, twice for 10 (`gemv_wide` in MLX's matmul).
    "16 bits": {1: 1, 2: 1.1, 5: 1.3, 6: 1.7, 10: 1.9, 11: 2.2, 32: 2.2, 64: 3.5},
    # For float32, and for 16 bits before M3, from M = 2 on (mlx#4265; ReDrafter, M1 Max).
    "matrix kernel": {1: 1, 2: 2, 15: 2.2, 32: 2.6, 64: 4},
}


def device_kind(weights: str) -> tuple[Device, str]:
    """Returns the device, and the key of `V` for this device and kind of weights.

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
    """Returns the maximum of proposals per row for num_draft="auto"."""
    return MOST_ON_METAL if mx.metal.is_available() and not on_cpu() else MOST


class Expected:
    """Estimates the seconds of steps by the table alone, equally in every run on a machine."""

    def __init__(self, target: T5 | ExactTarget, draft: T5 | None = None) -> None:
        """Starts with a target, or its `ExactTarget`, and the draft model; None without one."""
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
        """Returns the extra seconds of a draft pass that reads `tokens` more tokens per row."""
        more = self._pass(self.draft, rows * (1 + tokens)) - self._pass(self.draft, rows)
        return float(more)

    def _pass(self, model: tuple[float, float], positions: Any) -> Any:
        """Returns the seconds of a model's pass; `positions` counts the positions of all rows."""
        points, times = self.v
        slope = (times[-1] - times[-2]) / (points[-1] - points[-2])
        beyond = np.maximum(np.subtract(positions, points[-1]), 0)
        fixed, reading = model
        return fixed + reading * (np.interp(positions, points, times) + slope * beyond)


def _parts(model: T5 | ExactTarget, device: Device) -> tuple[float, float]:
    """Returns the seconds of a pass over one position: a fixed part, and one that v(M) scales."""
    read = model.weights_read()
    layers, reading = read.layers * device.layer, read.bytes / device.bandwidth
    return (0.0, layers + reading) if device.grows else (layers, reading)


UNIT = 100.0  # prior variance of the error log(seconds / expected) that all shapes share
SPREAD = 0.15**2  # prior variance of a shape's own error
NOISE = 0.25**2  # variance of a single step's error
SURPRISE = 2 * NOISE**0.5  # larger deviations from the mean are clamped to this
REACH = 6.0  # length scale of the covariance, in positions or draft passes
KNOWN = 3.0  # steps after which a shape's seconds are known
FADE = 0.997  # factor by which each step reduces the weight of all earlier steps
SHAPES = 32  # maximum of shapes kept
PATIENCE = 16  # steps between two updates of the posterior, once a shape is known
GRIDS = 64  # maximum of grids cached


class StepCosts:
    """Estimates the seconds of steps by expected costs, corrected by measured steps."""

    def __init__(self, expected: Callable[[int, Any, Any], Any]) -> None:
        """Starts with a function of (B, positions, draft passes) that gives a time in any unit."""
        self.expected = lru_cache(maxsize=512)(lambda *shape: float(expected(*shape)))
        self._expected_grid = expected
        self._seen: set[Shape] = set()
        self._shapes: list[Shape] = []  # the K measured shapes
        self._features = np.zeros((0, 4))  # (K, 4) features of the shapes
        self._weights: list[float] = []  # faded number of steps of each shape, times `_scale`
        self._errors: list[float] = []  # mean of log(seconds / expected) of each shape
        self._scale = 1.0  # weight of the next step; it grows, so that earlier steps fade
        self._known: Any = ()  # (K,) posterior mean of the errors
        self._solution: np.ndarray = np.zeros(0)  # (K,) (covariance + noise)^-1 errors
        self._unused = 0  # steps since the solution was computed
        self._grids: dict[int, tuple[Grid, Any]] = {}  # by id: a grid and its seconds

    def note(self, rows: int, positions: int, passes: int, seconds: float) -> None:
        """Learns from a step. A shape's first step is ignored, as it may have compiled kernels."""
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
        """Returns whether the faded number of steps of shape (d, m) in a grid is below `KNOWN`."""
        shape = grid.rows, int(grid.positions[d, m]), int(grid.passes[d, m])
        if shape not in self._shapes:
            return True
        return self._weights[self._shapes.index(shape)] < KNOWN * self._scale

    def seconds(self, grid: Grid) -> np.ndarray:
        """Returns the expected seconds (N, N) of steps of these shapes."""
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
        """Adds a shape; if there are already `SHAPES`, evicts the shape with the least weight."""
        if len(self._shapes) == SHAPES:
            least = self._weights.index(min(self._weights))
            for values in (self._shapes, self._weights, self._errors):
                del values[least]
        self._shapes.append(shape)
        self._weights.append(0.0)
        self._errors.append(0.0)
        self._features = np.array([_features(*shape) for shape in self._shapes])


class Grid(NamedTuple):
    """Shapes of steps of B rows, by the number of draft tokens and the number of copied tokens.

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
