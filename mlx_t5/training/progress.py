"""What a long training says on the way: how far it is, loss, speed, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlx_t5.training.trainer import Trainer


def bar(what: str, unit: str, total: int, done: int, items: Iterable[int] | None = None) -> Any:
    """A progress bar on standard error, where that is a terminal.

    Args:
        what: is going on.
        unit: what is counted.
        total: of these.
        done: by earlier runs.
        items: are passed on one by one; without them its `update` counts.
    """
    from tqdm import tqdm

    shown: dict[str, Any] = {"desc": what, "unit": f" {unit}", "disable": None}
    return tqdm(items, total=total, initial=done, **shown)


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
    began, total, iters = time.perf_counter(), 0, trainer.schedule.iters
    for step in bar("training", "steps", iters, done, steps):
        yield step
        total, seconds = total + tokens(step), time.perf_counter() - began
        if (step + 1) % every == 0:
            left = seconds / (step + 1 - done) * (iters - step - 1)
            log(
                f"step {step + 1} of {iters}: loss {trainer.loss:.4f}, "
                f"{total / seconds:,.0f} tokens/s, {left / 60:.1f} min left"
            )
