"""What a long training says on the way: loss, speed, and how long it is going to take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlx_t5.training.trainer import Trainer


def reported(
    trainer: Trainer,
    tokens: Callable[[int], int],
    every: int,
    log: Callable[[str], object],
    steps: Iterable[int],
    done: int,
) -> Iterator[int]:
    """Passes on the numbers of steps, with a progress bar and a line every so many of them.

    Args:
        trainer: takes the steps.
        tokens: of the batch of a step.
        every: steps between lines.
        log: gets them.
        steps: their numbers.
        done: how many were taken before.
    """
    from tqdm import tqdm

    began, total, iters = time.perf_counter(), 0, trainer.schedule.iters
    shown: dict[str, Any] = {"desc": "training", "unit": " steps", "disable": None}
    for step in tqdm(steps, initial=done, total=iters, file=sys.stderr, **shown):
        yield step
        total, seconds = total + tokens(step), time.perf_counter() - began
        if (step + 1) % every == 0:
            left = seconds / (step + 1 - done) * (iters - step - 1)
            log(
                f"step {step + 1} of {iters}: loss {trainer.loss:.4f}, "
                f"{total / seconds:,.0f} tokens/s, {left / 60:.1f} min left"
            )
