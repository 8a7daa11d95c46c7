"""Runs the training loop: takes steps, evaluates, keeps the best weights, and resumes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mlx_t5.training.batches import TrainingBatch
from mlx_t5.training.evaluation import Acceptance, Texts
from mlx_t5.training.learner import Learner
from mlx_t5.training.run_folder import RunFolder, TrainingProgress

PATIENCE = 5  # the training ends after this number of evaluations without improvement


@dataclass(frozen=True)
class Schedule:
    iters: int
    steps_per_eval: int
    save_every: int
    steps_per_report: int = 0  # 0: no reports


@dataclass
class Trainer:
    """One run of training, which may resume an earlier run."""

    learner: Learner
    batch: Callable[[int], list[TrainingBatch]]
    schedule: Schedule
    folder: RunFolder
    evaluate: Callable[[], Acceptance | Texts]
    log: Callable[[str], object]
    loss: float = math.nan  # the mean per token in the last step

    def __post_init__(self) -> None:
        first = self.learner.begin()
        self.state, self.progress = self.folder.state(first) or (first, TrainingProgress())

    @property
    def over(self) -> bool:
        return self.state.step >= self.schedule.iters or self.progress.behind >= PATIENCE

    def run(self) -> None:
        """Trains to the end, and gives the model the best weights; Ctrl-C first saves the state."""
        try:
            self._evaluate_if_due()
            if not self.over:
                self._train()
            if self.over and self.state.step < self.schedule.iters:
                since = f"no improvement in the last {PATIENCE} evaluations"
                self.log(f"stopped early at step {self.state.step}: {since}")
        except KeyboardInterrupt:
            if self.progress.best is not None:
                self.folder.save(self.state, self.progress)
            raise
        self.learner.put(self.folder.best(self.state.weights))
        best = self.progress
        self.log(f"trained for {best.seconds:.0f} s; the best weights are of step {best.best_step}")

    def _train(self) -> None:
        schedule, first, tokens = self.schedule, self.state.step, 0
        began = time.perf_counter()
        for step in bar("training", "steps", schedule.iters, first, range(first, schedule.iters)):
            started, batch = time.perf_counter(), self.batch(step)
            state, loss = self.learner.step(self.state, batch)
            if state is None:
                cure = "the best weights so far are kept; try a lower --learning-rate"
                self.log(f"step {step + 1}: loss or gradient is NaN; {cure}")
                return
            now = time.perf_counter()
            seconds = self.progress.seconds + now - started
            self.progress = replace(self.progress, seconds=seconds)
            self.state, self.loss = state, loss
            if not self._evaluate_if_due() and state.step % schedule.save_every == 0:
                self.folder.save(self.state, self.progress)
            if self.over:
                return
            if schedule.steps_per_report:
                tokens += sum(int((b.mask.sum() + b.counted.sum()).item()) for b in batch)
                if state.step % schedule.steps_per_report == 0:
                    self._report(state.step - first, tokens, time.perf_counter() - began)

    def _report(self, steps: int, tokens: int, seconds: float) -> None:
        step, iters = self.state.step, self.schedule.iters
        left = seconds / steps * (iters - step) / 60
        rate = f"{tokens / seconds:,.0f} tokens/s, {left:.1f} min left"
        self.log(f"step {step} of {iters}: loss {self.loss:.4f}, {rate}")

    def _evaluate_if_due(self) -> bool:
        step, schedule = self.state.step, self.schedule
        due = step == schedule.iters or step % schedule.steps_per_eval == 0
        if not due or self.progress.evaluated == step:
            return False
        self.learner.put(self.state.weights)
        evaluation, before = self.evaluate(), self.progress
        self.progress = replace(before, evaluated=step, behind=before.behind + 1)
        mark = f" ({before.behind + 1} behind)"
        if before.best is None or evaluation.value > before.best:
            self.folder.save_best(self.state.weights)
            best = evaluation.value
            self.progress = replace(self.progress, best=best, best_step=step, behind=0)
            mark = " (the best so far)" if step else ""
        loss = "" if math.isnan(self.loss) else f"loss {self.loss:.4f}, "
        self.log(f"step {step}: {loss}{evaluation}{mark}")
        self.folder.save(self.state, self.progress)
        return True


def bar(what: str, unit: str, total: int, done: int, items: Iterable[int] | None = None) -> Any:
    """A progress bar on standard error, if that is a terminal."""
    from tqdm import tqdm

    return tqdm(items, what, total, initial=done, unit=f" {unit}", disable=None)
