"""Seconds of single passes of a pair, for what the benchmarks say about costs.

The numbers of positions lie on both sides of the steps of Apple's GPUs. From M3 on, kernels read
the weights once for every 5 rows, up to 12 with 4 or 8 bits and up to 15 with 16, and larger
products are tiled (`get_qmv_batch_limit` in MLX's backend/metal/quantized.cpp, `gemv_wide_config`
in its matmul.cpp); on M1 and M2 the step is at 2. The order is that of importance, as a slow model
leaves no time for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.network.encoding import encoded
from mlx_t5.sampling.acceptance import accept
from mlx_t5.sampling.draws import Sampling, likeliest
from mlx_t5.settings import Settings

if TYPE_CHECKING:
    from model import T5

TARGET_POINTS = (1, 2, 5, 6, 16, 10, 11, 12, 13, 15, 8, 4, 32, 64)  # positions
NEEDED = 5  # points without which v(M) shows nothing
ROUNDS = 9  # more add nothing
SOURCE_TOKENS = 16  # of the prompt that the passes attend to
CHAIN = 4  # draft passes that follow each other, as nothing waits for the device while drafting


def ladder(
    seconds: Callable[[int], float], points: Sequence[int], budget: float, needed: int = NEEDED
) -> dict[int, float]:
    """Seconds by number of positions, ascending; every shape runs once before it counts.

    The speed of a machine changes, so every round is taken relative to its pass over one position,
    and medians are taken of that.

    Args:
        seconds: makes a pass over so many positions and returns what it took.
        points: numbers of positions, by importance; the first is 1.
        budget: seconds for all passes; what a first run compiles is not counted.
        needed: points that are measured however long it takes.
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
    order, regular = sorted(first), float(np.median([taken[1] for taken in rounds]))
    return {n: regular * float(np.median([took[n] / took[1] for took in rounds])) for n in order}


def timer(
    model: T5,
    clock: Callable[[], float] = time.perf_counter,
    source: int = SOURCE_TOKENS,
    slots: int = max(TARGET_POINTS),
) -> Callable[[int], float]:
    """A function that times a step's pass of the target over so many positions of one row.

    With what a step does around it: tokens are joined, accepted and waited for. The row's source
    has so many tokens, and its text as many slots.
    """
    prepared, greedy = _prepared(model, 1, source, slots), Sampling.of([Settings()])

    def seconds(positions: int) -> float:
        began = clock()
        tokens, x, lengths = _filler(model, 1, 1), None, mx.array([positions - 1], mx.int32)
        if positions > 1:
            x = _filler(model, 1, positions - 1)
            tokens = mx.concatenate([tokens, x], axis=1)
        logits = model.decode(tokens, prepared, [0])
        accepted, tokens = accept(logits, x, None, lengths, greedy, None)
        mx.concatenate([accepted[:, None], tokens], axis=1).tolist()
        return clock() - began

    return seconds


def drafting(
    model: T5,
    clock: Callable[[], float] = time.perf_counter,
    source: int = SOURCE_TOKENS,
) -> Callable[[int], float]:
    """A function that times a draft pass over one position of so many rows, as drafts are made.

    That is `CHAIN` passes, each fed what the last has chosen, and one wait. The rows' sources have
    so many tokens.
    """
    prepared = cache(lambda rows: _prepared(model, rows, source))

    def seconds(rows: int) -> float:
        slots, tokens = prepared(rows), _filler(model, rows, 1)
        began = clock()
        for i in range(CHAIN):
            tokens = likeliest(model.decode(tokens, slots, [i] * rows))
            mx.async_eval(tokens)
        tokens.tolist()
        return (clock() - began) / CHAIN

    return seconds


def _prepared(model: T5, rows: int, source: int, slots: int = max(TARGET_POINTS)) -> Any:
    """A cache of so many rows, with slots for every pass that is timed."""
    cache = encoded(model, [[model.config.pad_token_id] * source] * rows)
    cache.reserve(slots)
    mx.eval(cache.state)
    return cache


def _filler(model: T5, rows: int, length: int) -> mx.array:
    return mx.array([[model.config.pad_token_id] * length] * rows, mx.int32)
