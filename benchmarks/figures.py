"""Measures the costs of passes, and computes a variant's row in a table, such as its speed-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.passes import drafting, ladder, timer
from benchmarks.subject import Subject
from mlx_t5.engine.rows import Result
from mlx_t5.engine.tally import Tally, added
from mlx_t5.timing import Timed, Tokens, differing, speed_up

DRAFT_ROUNDS = 9
MEASURED_POSITIONS = 16  # v(M) is measured at least up to this M, the most that auto uses
Decode = Callable[[int], list[Result]]


@dataclass(frozen=True)
class PairCosts:
    """The costs of passes over one row.

    Attributes:
        seconds: the seconds of a target pass over M positions, keyed by M.
        v: the same time, relative to a target pass over one position, keyed by M.
        c: the time of a draft pass, relative to a target pass over one position.
    """

    seconds: dict[int, float]
    v: dict[int, float]
    c: float

    def speed_up(self, alpha: float, gamma: int) -> float:
        """Returns the speed-up of gamma proposals per step, each accepted with probability alpha.

        This is Theorem 3.8 of https://arxiv.org/abs/2211.17192, with v(gamma + 1) in place of 1. A
        step yields 1 + alpha + … + alpha^gamma tokens on average. Its gamma draft passes and its
        target pass over gamma + 1 positions take gamma c + v(gamma + 1) times as long as a target
        pass over one position; c and v are the attributes.
        """
        tokens = sum(alpha**n for n in range(gamma + 1))
        return tokens / (gamma * self.c + self.v[gamma + 1])

    @classmethod
    def of(cls, seconds: dict[int, float], draft: float) -> PairCosts:
        """Returns the costs, given measured seconds.

        Args:
            seconds: the seconds of a target pass over M positions, keyed by M.
            draft: seconds of a draft pass.
        """
        return cls(seconds, {m: s / seconds[1] for m, s in seconds.items()}, draft / seconds[1])


def pair_costs(
    subject: Subject,
    prompts: Sequence[str],
    points: Sequence[int],
    seconds: float,
    needed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PairCosts:
    """Measures the costs of passes over one row.

    Args:
        subject: the pair of models.
        prompts: the prompts; the row's source has the length of a median prompt.
        points: the numbers of positions of the target's passes, as in `ladder`.
        seconds: the time for the target's passes, which is the `budget` of `ladder`.
        needed: the number of points that are measured even if the time is exceeded.
        clock: a function that returns the time in seconds.
    """
    source = source_length(subject, prompts)
    target = timer(subject.target, clock, source=source, slots=max(points))
    passes, draft = ladder(target, points, seconds, needed), drafting(subject.draft, clock, source)
    return PairCosts.of(passes, statistics.median([draft(1) for _ in range(1 + DRAFT_ROUNDS)][1:]))


def source_length(subject: Subject, prompts: Sequence[str]) -> int:
    """Returns the number of source tokens in a prompt of median length."""
    return statistics.median_high(len(subject.tokenizer.encode(prompt)) for prompt in prompts)


def figures(timed: Timed, regular: Timed) -> dict[str, Any]:
    """Returns a variant's figures: speed, counts of tokens and steps, and how many texts differ.

    Counts are means over the repeats, which may differ if the number of proposals is "auto".

    Args:
        timed: the variant's times, with a list of `Result`s for each timed run.
        regular: the times of regular decoding.
    """
    repeats, results = len(timed.seconds), results_of(timed)
    tally, speculation = Tally.of(results), [result.stats.speculation for result in results]
    counts = {name: n / repeats for name, n in asdict(tally).items() if isinstance(n, int)}
    return {
        **counts,
        "tokens_per_second": 1 / timed.seconds_a_token(),
        "speed_up": speed_up(regular, timed),
        "tokens_per_call": tally.tokens_per_call,
        "acceptance_rate": tally.acceptance,
        "alpha": tally.alpha,
        "steps_by_accepted": [
            steps / repeats for steps in added([s.steps_by_accepted for s in speculation])
        ],
        "steps_by_length": [
            steps / repeats for steps in added([s.steps_by_length for s in speculation])
        ],
        "different": differing(_tokens(timed), _tokens(regular)),
        "seconds": timed.seconds,
        "tokens": timed.tokens,
    }


def results_of(timed: Timed) -> list[Result]:
    """Returns the results in `timed` as one list; the outcome of each turn is a list of results."""
    return [result for row in timed.outcomes for turn in row for result in turn]


def _tokens(timed: Timed) -> list[list[Tokens]]:
    return [[[result.tokens for result in turn] for turn in row] for row in timed.outcomes]
