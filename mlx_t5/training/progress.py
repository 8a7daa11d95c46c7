"""Reports the progress of training: steps, loss, speed and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mlx_t5.training.trainer import Trainer


def bar(what: str, unit: str, total: int, done: int, items: Iterable[int] | None = None) -> Any:
    """A progress bar on standard error, if that is a terminal."""
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
    """Yields `steps` under a progress bar, and logs a line every so many steps."""
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
