"""The training itself: steps, evaluations, the best draft so far, and going on after a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mlx_t5.training.answers import LabelledExample
from mlx_t5.training.batches import Batch, batch_at, collate, parts
from mlx_t5.training.learner import Learner
from mlx_t5.training.run_folder import Progress, RunFolder

PATIENCE = 5  # evaluations without a better draft, after which the training ends


@dataclass(frozen=True)
class Schedule:
    """How long, how much at a time, and how often what is done.

    Attributes:
        iters: steps of the whole run.
        batch_size: examples a step.
        rows_at_once: of them, as many as memory is meant to suffice for.
        steps_per_eval: steps between evaluations.
        save_every: steps after which the state is written.
        seed: of the order of the examples.
    """

    iters: int
    batch_size: int
    rows_at_once: int
    steps_per_eval: int
    save_every: int
    seed: int


@dataclass(frozen=True)
class Score:
    """How a draft fared in the engine, on held-out prompts.

    Attributes:
        acceptance: accepted / drafted tokens.
        tokens_per_call: tokens decided a pass of the target.
    """

    acceptance: float
    tokens_per_call: float

    def __str__(self) -> str:
        return f"acceptance {self.acceptance:.1%}, {self.tokens_per_call:.2f} tokens a call"


class Trainer:
    """One run of training, which may be the continuation of another.

    Attributes:
        state: after the last step that was whole.
        progress: up to there.
    """

    def __init__(
        self,
        learner: Learner,
        labelled: Sequence[LabelledExample],
        schedule: Schedule,
        folder: RunFolder,
        evaluate: Callable[[], Score],
        tell: Callable[[str], object],
    ) -> None:
        """Takes up what an earlier run has left.

        Args:
            learner: with the draft.
            labelled: examples to learn from.
            schedule: how.
            folder: where the state is kept.
            evaluate: judges the learner's draft, whose weights are the state's by then.
            tell: gets one line after every evaluation.
        """
        self.learner, self.labelled, self.schedule, self.folder = (
            learner,
            labelled,
            schedule,
            folder,
        )
        self.evaluate, self.tell = evaluate, tell
        first = learner.begin()
        self.state, self.progress = folder.state(first) or (first, Progress())
        self.loss = math.nan

    @property
    def over(self) -> bool:
        """Whether nothing more is to be gained."""
        return self.state.step >= self.schedule.iters or self.progress.behind >= PATIENCE

    def run(self, steps: Callable[[Iterable[int], int], Iterable[int]]) -> None:
        """Trains to the end, and gives the draft the best weights.

        Whatever interrupts it, the state of the last whole step is written before it ends.

        Args:
            steps: passes on the steps' numbers, given how many were taken before: a progress bar.
        """
        try:
            self._judge_if_due()
            if not self.over:
                self._train(steps(range(self.state.step, self.schedule.iters), self.state.step))
        except KeyboardInterrupt:
            if self.progress.best is not None:
                self.folder.save(self.state, self.progress)
            raise
        self.learner.put(self.folder.best(self.state.weights))

    def _train(self, steps: Iterable[int]) -> None:
        began = time.perf_counter()
        for _ in steps:
            state, loss = self.learner.step(self.state, self._batch(self.state.step))
            if state is None:
                self.tell(
                    f"step {self.state.step + 1}: the loss or its gradient is no number; stopped. "
                    "The best draft so far is kept; try a lower --learning-rate"
                )
                return
            now = time.perf_counter()
            seconds, began = self.progress.seconds + now - began, now
            self.progress = replace(self.progress, seconds=seconds)
            self.state, self.loss = state, loss
            if not self._judge_if_due() and state.step % self.schedule.save_every == 0:
                self.folder.save(self.state, self.progress)
            if self.over:
                return
            began += time.perf_counter() - now

    def _batch(self, step: int) -> list[Batch]:
        """The parts of a step's batch."""
        schedule, draft = self.schedule, self.learner.draft
        rows = batch_at(self.labelled, schedule.batch_size, schedule.seed, step)
        tokens = draft.config.decoder_start_token_id, draft.config.pad_token_id
        kept = draft.shares_with is not None and all(self.labelled[i].file for i in rows)
        return [
            collate([self.labelled[i] for i in part], *tokens, keep_states=kept)
            for part in parts(rows, schedule.rows_at_once)
        ]

    def _judge_if_due(self) -> bool:
        """Evaluates the draft every so many steps and at the end, and writes state and best.

        Returns:
            Whether it did.
        """
        step, schedule = self.state.step, self.schedule
        due = step == schedule.iters or step % schedule.steps_per_eval == 0
        if not due or self.progress.judged == step:
            return False
        self.learner.put(self.state.weights)
        score = self.evaluate()
        progress = replace(self.progress, judged=step)
        better = progress.best is None or score.tokens_per_call > progress.best
        if better:
            self.folder.save_best(self.state.weights)
            self.progress = replace(progress, best=score.tokens_per_call, best_step=step, behind=0)
        else:
            self.progress = replace(progress, behind=progress.behind + 1)
        loss = "" if math.isnan(self.loss) else f"loss {self.loss:.4f}, "
        behind = self.progress.behind
        mark = " (the best so far)" if better and step else f" ({behind} behind)" * bool(behind)
        self.tell(f"step {step}: {loss}{score}{mark}")
        self.folder.save(self.state, self.progress)
        return True
