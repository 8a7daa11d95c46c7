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
    """The schedule of a run.

    Attributes:
        iters: the number of steps in the whole run.
        steps_per_eval: the number of steps between two evaluations.
        save_every: the number of steps between two writes of the state.
    """

    iters: int
    steps_per_eval: int
    save_every: int


@dataclass(frozen=True)
class Evaluation:
    """The measurements of decoding the held-out prompts with a draft.

    Attributes:
        acceptance: the number of accepted tokens divided by the number of drafted tokens.
        tokens_per_call: the mean number of tokens decided per pass of the target.
    """

    acceptance: float
    tokens_per_call: float

    @property
    def value(self) -> float:
        """The value by which the best draft is chosen: `tokens_per_call`."""
        return self.tokens_per_call

    def __str__(self) -> str:
        return f"acceptance {self.acceptance:.1%}, {self.tokens_per_call:.2f} tokens a call"


class Trainer:
    """One run of training, which may resume an earlier run.

    Attributes:
        state: the state after the last complete step.
        progress: the progress up to that step.
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
        """Reads the state of an earlier run, if there is one.

        Args:
            learner: the learner, which trains the model.
            batch: a function from a step's number to the step's micro-batches.
            schedule: the schedule of the run.
            folder: the work folder, which keeps the state.
            evaluate: a function that evaluates the learner's model; before each call, the model is
                given the state's weights.
            log: a function that is given one line after every evaluation.
        """
        self.learner, self.batch, self.schedule, self.folder = learner, batch, schedule, folder
        self.evaluate, self.log = evaluate, log
        first = learner.begin()
        self.state, self.progress = folder.state(first) or (first, TrainingProgress())
        self.loss = math.nan

    @property
    def over(self) -> bool:
        """Whether the training has ended."""
        return self.state.step >= self.schedule.iters or self.progress.behind >= PATIENCE

    def run(self, steps: Callable[[Iterable[int], int], Iterable[int]]) -> None:
        """Trains to the end, and gives the model the best weights.

        On Ctrl-C, first writes the state after the last complete step, then raises the interrupt.

        Args:
            steps: a function that is given the numbers of the remaining steps and the number of
                steps already taken. It returns the first argument, wrapped in a progress bar.
        """
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
                self.log(
                    f"step {self.state.step + 1}: the loss or its gradient is no number; stopped. "
                    "The best weights so far are kept; try a lower --learning-rate"
                )
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
        """If due, evaluates the model, and writes the state and any new best weights.

        An evaluation is due before the first step, after every `steps_per_eval` steps and after the
        last step.

        Returns:
            Whether the model was evaluated.
        """
        step, schedule = self.state.step, self.schedule
        due = step == schedule.iters or step % schedule.steps_per_eval == 0
        if not due or self.progress.evaluated == step:
            return False
        self.learner.put(self.state.weights)
        evaluation, before = self.evaluate(), self.progress
        value = evaluation.value
        better, behind = before.best is None or value > before.best, before.behind + 1
        if better:
            self.folder.save_best(self.state.weights)
            self.progress = replace(before, evaluated=step, best=value, best_step=step, behind=0)
        else:
            self.progress = replace(before, evaluated=step, behind=behind)
        loss = "" if math.isnan(self.loss) else f"loss {self.loss:.4f}, "
        mark = ("" if not step else " (the best so far)") if better else f" ({behind} behind)"
        self.log(f"step {step}: {loss}{evaluation}{mark}")
        self.folder.save(self.state, self.progress)
        return True
