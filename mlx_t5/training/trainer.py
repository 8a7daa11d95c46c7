"""Runs the training loop: takes steps, evaluates, keeps the best weights, and resumes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mlx_t5.training.batches import TrainingBatch
from mlx_t5.training.learner import Learner
from mlx_t5.training.run_folder import RunFolder, TrainingProgress
from mlx_t5.training.texts import Texts

PATIENCE = 5  # the training ends after this number of evaluations without improvement


@dataclass(frozen=True)
class Schedule:
    iters: int
    steps_per_eval: int
    save_every: int


@dataclass(frozen=True)
class Evaluation:
    acceptance: float
    tokens_per_call: float

    @property
    def value(self) -> float:
        return self.tokens_per_call

    def __str__(self) -> str:
        return f"acceptance {self.acceptance:.1%}, {self.tokens_per_call:.2f} tokens a call"


class Trainer:
    """One run of training, which may resume an earlier run.

    Attributes:
        state: the state after the last complete step.
        loss: the mean loss per token in the last step; NaN before the first step of this run.
    """

    def __init__(
        self,
        learner: Learner,
        batch: Callable[[int], list[TrainingBatch]],
        schedule: Schedule,
        folder: RunFolder,
        evaluate: Callable[[], Evaluation | Texts],
        log: Callable[[str], object],
    ) -> None:
        self.learner, self.batch, self.schedule, self.folder = learner, batch, schedule, folder
        self.evaluate, self.log = evaluate, log
        first = learner.begin()
        self.state, self.progress = folder.state(first) or (first, TrainingProgress())
        self.loss = math.nan

    @property
    def over(self) -> bool:
        return self.state.step >= self.schedule.iters or self.progress.behind >= PATIENCE

    def run(self, steps: Callable[[Iterable[int], int], Iterable[int]]) -> None:
        """Trains to the end, and gives the model the best weights; Ctrl-C first saves the state."""
        try:
            self._evaluate_if_due()
            if not self.over:
                self._train(steps(range(self.state.step, self.schedule.iters), self.state.step))
            if self.over and self.state.step < self.schedule.iters:
                since = f"no improvement in the last {PATIENCE} evaluations"
                self.log(f"stopped early at step {self.state.step}: {since}")
        except KeyboardInterrupt:
            if self.progress.best is not None:
                self.folder.save(self.state, self.progress)
            raise
        self.learner.put(self.folder.best(self.state.weights))

    def _train(self, steps: Iterable[int]) -> None:
        began = time.perf_counter()
        for _ in steps:
            state, loss = self.learner.step(self.state, self.batch(self.state.step))
            if state is None:
                cure = "the best weights so far are kept; try a lower --learning-rate"
                self.log(f"step {self.state.step + 1}: loss or gradient is NaN; {cure}")
                return
            now = time.perf_counter()
            seconds, began = self.progress.seconds + now - began, now
            self.progress = replace(self.progress, seconds=seconds)
            self.state, self.loss = state, loss
            if not self._evaluate_if_due() and state.step % self.schedule.save_every == 0:
                self.folder.save(self.state, self.progress)
            if self.over:
                return
            began += time.perf_counter() - now

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
