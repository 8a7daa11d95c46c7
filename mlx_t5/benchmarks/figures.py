"""Measures the costs of passes, and computes a variant's row in a table, such as its speed-up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_t5.benchmarks.pass_times import drafting, ladder, timer
from mlx_t5.benchmarks.subject import Subject
from mlx_t5.engine.rows import Result, total
from mlx_t5.timing import Timed, Tokens, differing, speed_up

DRAFT_ROUNDS = 9
MEASURED_POSITIONS = 16  # v(M) is measured at least up to this M, the most that auto uses
Decode = Callable[[int], list[Result]]


@dataclass(frozen=True)
class PairCosts:
    """The costs of passes over one row.

    Attributes:
        seconds: the seconds of a target pass over M positions, keyed by M.
        v: the same, relative to a target pass over one position.
        c: the time of a draft pass, relative to a target pass over one position; None without a
            draft.
    """

    seconds: dict[int, float]
    v: dict[int, float]
    c: float | None

    def speed_up(self, alpha: float, gamma: int) -> float:
        """Theorem 3.8 of https://arxiv.org/abs/2211.17192, with v(gamma + 1) in place of 1."""
        tokens = sum(alpha**n for n in range(gamma + 1))
        return tokens / (gamma * (self.c or 0.0) + self.v[gamma + 1])


def pair_costs(
    subject: Subject, prompts: Sequence[str], points: Sequence[int], seconds: float, needed: int
) -> PairCosts:
    """Measures the costs of passes over a row whose source is a median prompt; see `ladder`."""
    source = source_length(subject, prompts)
    target = timer(subject.target, source, max(points))
    passes, c = ladder(target, points, seconds, needed), None
    if subject.draft:
        draft = drafting(subject.draft, source)
        c = statistics.median([draft() for _ in range(1 + DRAFT_ROUNDS)][1:]) / passes[1]
    return PairCosts(passes, {m: s / passes[1] for m, s in passes.items()}, c)


def source_length(subject: Subject, prompts: Sequence[str]) -> int:
    return statistics.median_high(len(subject.tokenizer.encode(prompt)) for prompt in prompts)


def figures(timed: Timed, regular: Timed) -> dict[str, Any]:
    """A variant's table row; counts are means over the repeats, as "auto" may vary."""
    repeats, results = len(timed.seconds), results_of(timed)
    stats = total(results)
    speculation = stats.speculation
    return {
        "target_calls": stats.target_calls / repeats,
        "decided": stats.decided / repeats,
        "drafted": stats.drafted / repeats,
        "accepted": stats.accepted / repeats,
        "tokens_per_second": 1 / timed.seconds_a_token(),
        "speed_up": speed_up(regular, timed),
        "tokens_per_call": stats.tokens_per_call,
        "acceptance_rate": stats.acceptance_rate if stats.drafted else None,
        "alpha": speculation.alpha,
        "steps_by_accepted": [n / repeats for n in speculation.steps_by_accepted],
        "steps_by_length": [n / repeats for n in speculation.steps_by_length],
        "different": differing(_tokens(timed), _tokens(regular)),
        "seconds": timed.seconds,
        "tokens": timed.tokens,
    }


def results_of(timed: Timed) -> list[Result]:
    return [result for row in timed.outcomes for turn in row for result in turn]


def _tokens(timed: Timed) -> list[list[Tokens]]:
    return [[[result.tokens for result in turn] for turn in row] for row in timed.outcomes]
