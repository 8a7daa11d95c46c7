"""Describes a run of main.py: its settings, its prompts, and the part that is already done."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, tee
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.arguments import log
from mlx_t5.cli.input import Lines
from mlx_t5.cli.resume import Form, ResumePoint, find_resume_point

if TYPE_CHECKING:
    from mlx_t5.cli.options import MainOptions
    from mlx_t5.engine.codec import Job
    from mlx_t5.loading import ModelPair

# Computes outcomes from prompts, their indexes, and a test of whether the next prompt is ready.
Compute = Callable[[Iterator[Any], Iterator[int], Callable[[], bool]], Iterator[Any]]


@dataclass(frozen=True)
class MainJob:
    """The options, settings and models that main.py uses for every prompt."""

    options: MainOptions
    spec: Job  # settings that the user omits come from the model
    prefix: str  # put before every prompt
    models: ModelPair

    @property
    def form(self) -> Form:
        options = self.options
        if not options.writes_text:
            return Form(1, "logprob" if options.score else "embedding")
        spec = self.spec
        texts = spec.num_samples * spec.settings.num_return_sequences  # one of the factors is 1
        return Form(texts, "text" if options.json else None)


class Run:
    """The prompts that remain to be done, and the output of those that an earlier run has done.

    Attributes:
        prompts: the remaining prompts: a list, or an iterator over the lines of an input file.
        count: number of all prompts, including those done; None if the number is not known.
        first: number of prompts already done.
        outcomes_a_prompt: number of outcomes per prompt; each outcome is one line.
        output_file: the file for results; None: standard output.
        keep: number of bytes of earlier results in that file.
    """

    def __init__(self, prompts: Any, done: ResumePoint, job: MainJob) -> None:
        """Callers use `of`, which finds the remaining prompts."""
        self.prompts, self.first, self.keep = prompts, done.prompts, done.size
        self.count = len(prompts) if isinstance(prompts, list) else getattr(prompts, "count", None)
        self.outcomes_a_prompt = job.form.texts
        self.output_file: str | None = job.options.output_file
        self._ready = getattr(prompts, "ready", lambda: True)

    @staticmethod
    def of(prompts: Any, job: MainJob) -> Run:
        """The run of a list or an input's `Lines`; `--resume` skips the finished prompts."""
        done, output_file = ResumePoint(), job.options.output_file
        if output_file and job.options.resume and isinstance(prompts, Lines):
            done = find_resume_point(output_file, prompts, job.form, prompts.count)
        return Run(prompts, done, job)

    def clock(self) -> float:
        """Elapsed time, not counting waits for input."""
        return time.perf_counter() - getattr(self.prompts, "waited", 0.0)

    def log_resumed(self) -> None:
        of_all = f" of {self.count}" if self.count else ""
        lines = self.first * self.outcomes_a_prompt
        log(f"resuming: {lines} lines are kept, {self.first}{of_all} prompts are done")

    def outcomes(self, compute: Compute) -> Iterator[tuple[int, Any, Any]]:
        """Yields, for each outcome in order, the prompt's number (from 1), the prompt, the outcome.

        Args:
            compute: a function that computes outcomes from two iterators. It must draw a prompt
                from the first, then its index from the second, and only then the next prompt.
        """
        in_hand: deque[tuple[int, Any]] = deque()

        def drawn() -> Iterator[Any]:
            for index, prompt in zip(count(self.first), self.prompts, strict=False):
                in_hand.append((index + 1, prompt))
                yield prompt

        def indexes() -> Iterator[int]:
            while True:
                yield in_hand[-1][0] - 1

        for done, outcome in enumerate(compute(drawn(), indexes(), self._ready), 1):
            yield *in_hand[0], outcome
            if done % self.outcomes_a_prompt == 0:
                in_hand.popleft()


def prefixed(prompts: Iterable[Any], prefix: str) -> Iterator[Any]:
    """Puts the prefix before each prompt, in a pair before its first text; passes errors on."""
    for prompt in prompts:
        if isinstance(prompt, tuple):
            yield prefix + prompt[0], prompt[1]
        else:
            yield prefix + prompt if isinstance(prompt, str) else prompt


def lines_of(input_file: str, options: MainOptions) -> Lines:
    """The input's lines; with drafting, a line may contain a prediction of its output."""
    if input_file == "-" and sys.stdin.isatty():
        log("type one line per prompt; Ctrl-D ends the input")
    proposing = options.writes_text and not options.regular_decode
    return Lines(input_file, options.score, "prediction" if proposing else "")


def unpaired(items: Iterable[Any]) -> tuple[Iterator[Any], Iterator[Any]]:
    """An iterator over prompts, and one over their predictions (None: no prediction)."""
    prompts, predictions = tee(i if isinstance(i, tuple) else (i, None) for i in items)
    return (prompt for prompt, _ in prompts), (prediction for _, prediction in predictions)
