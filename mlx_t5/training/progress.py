"""Reports the progress of training: steps, loss, speed and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlx_t5.training.trainer import Trainer


def bar(what: str, unit: str, total: int, done: int, items: Iterable[int] | None = None) -> Any:
    """Returns a progress bar on standard error, shown only if standard error is a terminal.

    Args:
        what: the name of the activity.
        unit: the name of what is counted, such as steps.
        total: the number of all units.
        done: the number of units done by earlier runs.
        items: the items over which the bar iterates; without items, `update` moves the bar.
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
    """Yields the numbers in `steps`, while showing a progress bar and logging a line now and then.

    Args:
        trainer: the trainer that takes the steps.
        tokens: a function from a step's number to the number of tokens in the step's batch.
        every: the number of steps between two logged lines.
        log: a function that is given the lines.
        steps: the numbers of the steps to take.
        done: the number of steps taken by earlier runs.
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
