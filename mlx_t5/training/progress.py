"""Reports the progress of a training: steps, loss, speed and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlx_t5.training.trainer import Trainer


def bar(what: str, unit: str, total: int, done: int, items: Iterable[int] | None = None) -> Any:
    """Returns a progress bar on standard error, shown if that is a terminal.

    Args:
        what: the activity.
        unit: the unit that is counted.
        total: number of all units.
        done: number of units done by earlier runs.
        items: items to iterate over; without them call `update`.
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
    """Yields the numbers of steps, with a progress bar and a line every so many steps.

    Args:
        trainer: takes the steps.
        tokens: returns the number of tokens in a step's batch.
        every: steps between lines.
        log: gets the lines.
        steps: the numbers of the steps.
        done: number of steps taken before.
    """
    began, total, iters = time.perf_counter(), 0, trainer.schedule.iters
    for step in bar("training", "steps", iters, done, steps):
        yield step
        total, seconds = total + tokens(step), time.perf_counter() - began
        if (step + 1) % every == 0:
            remaining = seconds / (step + 1 - done) * (iters - step - 1)
            log(
                f"step {step + 1} of {iters}: loss {trainer.loss:.4f}, "
                f"{total / seconds:,.0f} tokens/s, {remaining / 60:.1f} min left"
            )
