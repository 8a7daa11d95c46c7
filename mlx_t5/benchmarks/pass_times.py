"""Times single passes of a pair of models, for the costs that the benchmarks report.

On Apple's GPUs, a pass becomes slower at certain numbers of positions; `TARGET_POINTS` has numbers
just below and above these. From the M3 on, kernels read the weights once for every 5 positions.
This holds for up to 12 positions if weights have 4 or 8 bits, and for up to 15 if weights have 16
bits. Products over more positions are tiled (`get_qmv_batch_limit` in MLX's
backend/metal/quantized.cpp, `gemv_wide_config` in matmul.cpp). On M1 and M2, a pass becomes slower
at 2 positions. The important numbers come first, as a slow model leaves no time for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.network.encoding import cache_of
from mlx_t5.sampling.acceptance import accept
from mlx_t5.sampling.draws import Sampling, likeliest
from mlx_t5.settings import Settings

if TYPE_CHECKING:
    from mlx_t5.model import T5

TARGET_POINTS = (1, 2, 5, 6, 16, 10, 11, 12, 13, 15, 8, 4, 32, 64)  # positions
NEEDED = 5  # minimum number of points at which v(M) is informative
ROUNDS = 9  # maximum number of rounds
CHAIN = 4  # draft passes in a row without waiting for the device, as in drafting


def ladder(
    seconds: Callable[[int], float], points: Sequence[int], budget: float, needed: int = NEEDED
) -> dict[int, float]:
    """The seconds of a pass for each number of positions.

    Every number of positions is timed once per round. The speed of a machine changes, so each time
    is divided by the time over one position in the same round. The median of these ratios is
    multiplied by the median time over one position.

    Args:
        seconds: runs a pass over a number of positions and returns its seconds.
        points: numbers of positions, the most important first; the first number is 1.
        budget: seconds for all passes except the first of each shape, which may compile kernels.
        needed: the number of points that are measured even if the budget is exceeded.
    """
    first: dict[int, float] = {}
    for n in points:
        if len(first) >= needed and 2 * sum(first.values()) > budget:
            break
        seconds(n)  # may compile its kernels
        first[n] = seconds(n)
    rounds, round_seconds = [first], sum(first.values())
    while len(rounds) < ROUNDS and (len(rounds) + 2) * round_seconds < budget:
        rounds.append({n: seconds(n) for n in first})
    order, regular = sorted(first), float(np.median([times[1] for times in rounds]))
    return {n: regular * float(np.median([took[n] / took[1] for took in rounds])) for n in order}


def timer(model: T5, source: int, slots: int = max(TARGET_POINTS)) -> Callable[[int], float]:
    """Times a step of the target, with joining the proposals, accepting and waiting."""
    prepared, greedy = _prepared(model, source, slots), Sampling.of([Settings()])

    def seconds(positions: int) -> float:
        began = time.perf_counter()
        tokens, x, lengths = _filler(model, 1), None, mx.array([positions - 1], mx.int32)
        if positions > 1:
            x = _filler(model, positions - 1)
            tokens = mx.concatenate([tokens, x], axis=1)
        logits = model.decode(tokens, prepared, [0])
        accepted, tokens = accept(logits, x, None, lengths, greedy, None)
        mx.concatenate([accepted[:, None], tokens], axis=1).tolist()
        return time.perf_counter() - began

    return seconds


def drafting(model: T5, source: int) -> Callable[[], float]:
    """Times a draft pass over one position: the mean of `CHAIN` passes, without waiting between."""
    prepared = _prepared(model, source, CHAIN)

    def seconds() -> float:
        tokens, began = _filler(model, 1), time.perf_counter()
        for i in range(CHAIN):
            tokens = likeliest(model.decode(tokens, prepared, [i]))
            mx.async_eval(tokens)
        tokens.tolist()
        return (time.perf_counter() - began) / CHAIN

    return seconds


def _prepared(model: T5, source: int, slots: int) -> Any:
    cache = cache_of(model, [[model.config.pad_token_id] * source])
    cache.reserve(slots)
    mx.eval(cache.state)
    return cache


def _filler(model: T5, length: int) -> mx.array:
    return mx.array([[model.config.pad_token_id] * length], mx.int32)
