"""Runs the training loop: takes steps, evaluates, keeps the best weights, and resumes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mlx_t5.training.batches import TrainingBatch
from mlx_t5.training.evaluation import Acceptance, Texts
from mlx_t5.training.learner import Learner
from mlx_t5.training.run_folder import RunFolder, TrainingProgress


@dataclass(frozen=True)
class Schedule:
    """In steps; the training ends after `patience` evaluations that are not the best, if not 0."""

    iters: int
    steps_per_eval: int
    save_every: int
    steps_per_report: int
    patience: int = 0


def schedule_of(args: Any) -> Schedule:
    """The schedule that the options of a command line ask for."""
    return Schedule(**{one.name: getattr(args, one.name) for one in fields(Schedule)})


@dataclass
class Trainer:
    """One run of training, which may resume an earlier run.

    Attributes:
        log: prints a line, and takes its numbers as keywords.
        failed: whether a loss or a gradient was NaN or infinite.
        history: for each evaluation, the mean training loss before it, and its value.
    """

    learner: Learner
    batch: Callable[[int], list[TrainingBatch]]
    schedule: Schedule
    folder: RunFolder
    evaluate: Callable[[], Acceptance | Texts]
    log: Callable[..., object]
    failed: bool = False
    history: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = self.learner.initial_state()
        self.state, self.progress = self.folder.state(first) or (first, TrainingProgress())
        self.losses: list[float] = []  # of each step of this process

    @property
    def over(self) -> bool:
        patience = self.schedule.patience
        return self.state.step >= self.schedule.iters or 0 < patience <= self.progress.behind

    def run(self) -> bool:
        """Trains to the end, and gives the model the weights to write; False if there are none.

        They are the best ones. If none were better than those before the training, they are the
        last ones, but none after a loss that is NaN. Ctrl-C first saves the state.
        """
        try:
            self._evaluate_if_due()
            if not self.over:
                self._train()
        except KeyboardInterrupt:
            if self.progress.best is not None:
                self.folder.save(self.state, self.progress)
            raise
        best = self.progress
        step = self.state.step
        if self.over and step < self.schedule.iters:
            why = f"{best.behind} evaluations without a better one than step {best.best_step}"
            self.log(f"stopped at step {step} of {self.schedule.iters}: {why} (--patience)")
        cure = "try another --learning-rate, more --iters or more data"
        if best.best_step:
            self.learner.update_model(self.folder.best(self.state.weights))
            which = f"the best weights are of step {best.best_step}"
        elif self.failed:
            which = f"no weights were better than before the training, so none are written; {cure}"
        else:
            self.learner.update_model(self.state.weights)
            which = "warning: no evaluation was better than before the training; the last weights"
            which += f", of step {step}, are written; {cure}"
        self.log(f"trained for {best.seconds:.0f} s; {which}")
        return best.best_step > 0 or not self.failed

    def _train(self) -> None:
        schedule, first, tokens = self.schedule, self.state.step, 0
        before = self.progress.seconds  # of the steps of earlier processes
        started = time.perf_counter()
        for step in bar("training", "steps", schedule.iters, first, range(first, schedule.iters)):
            began = time.perf_counter()
            batch = self.batch(step)
            state, loss = self.learner.step(self.state, batch)
            if state is None:
                self.failed = True
                cure = "try a lower --learning-rate"
                self.log(f"step {step + 1}: loss or gradient is NaN; stopping; {cure}")
                return
            seconds = self.progress.seconds + time.perf_counter() - began
            self.progress = replace(self.progress, seconds=seconds)
            self.state = state
            self.losses.append(loss)
            tokens += sum(int((b.mask.sum() + b.counted.sum()).item()) for b in batch)
            if state.step % schedule.steps_per_report == 0:
                elapsed = time.perf_counter() - started
                self._report(tokens / (seconds - before), elapsed / (state.step - first))
            if not self._evaluate_if_due() and state.step % schedule.save_every == 0:
                self.folder.save(self.state, self.progress)
            if self.over:
                return

    def _report(self, tokens_per_second: float, seconds_per_step: float) -> None:
        """Logs a line about the last steps; `seconds_per_step` includes evaluations."""
        step, iters = self.state.step, self.schedule.iters
        loss, rate = self._loss(self.schedule.steps_per_report), self.learner.rate(step - 1)
        left = (iters - step) * seconds_per_step
        speed = f"{tokens_per_second:,.0f} tokens/s, {left / 60:.1f} min left"
        numbers = {"tokens_per_second": tokens_per_second, "seconds_left": left}
        line = f"step {step} of {iters}: loss {loss:.4f}, learning rate {rate:.3g}, {speed}"
        self.log(line, step=step, loss=loss, learning_rate=rate, **numbers)

    def _loss(self, steps: int) -> float:
        """The mean loss of the last steps."""
        losses = self.losses[-steps:]
        return sum(losses) / len(losses) if losses else math.nan

    def _evaluate_if_due(self) -> bool:
        step, schedule, before = self.state.step, self.schedule, self.progress
        due = step == schedule.iters or step % schedule.steps_per_eval == 0
        if not due or before.evaluated == step:
            return False
        self.learner.update_model(self.state.weights)
        evaluation = self.evaluate()
        value = -math.inf if math.isnan(evaluation.value) else evaluation.value
        self.progress = replace(before, evaluated=step, behind=before.behind + 1)
        mark = f" ({before.behind + 1} since the best)"
        if before.best is None or value > before.best:
            if step:  # the weights before the training are never written
                self.folder.save_best(self.state.weights)
            self.progress = replace(self.progress, best=value, best_step=step, behind=0)
            mark = " (the best so far)" if step else ""
        loss = self._loss(schedule.steps_per_eval)
        self.history.append((loss, value))
        text = "" if math.isnan(loss) else f"loss {loss:.4f}, "
        numbers = {f"eval_{name}": number for name, number in evaluation.numbers.items()}
        self.log(f"step {step}: {text}{evaluation}{mark}", step=step, **numbers)
        self.folder.save(self.state, self.progress)
        return True


def bar(what: str, unit: str, total: int, done: int, items: Iterable[Any] | None = None) -> Any:
    """A progress bar on standard error, if that is a terminal."""
    from tqdm import tqdm

    leave = what != "evaluating"  # there is one in each evaluation
    return tqdm(items, what, total, leave, initial=done, unit=f" {unit}", disable=None)
