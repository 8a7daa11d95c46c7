"""What passes cost, and the figures of every variant of decoding."""

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
MEASURED_POSITIONS = 16  # v(M) is measured up to here at least, which is what auto uses at most
Decode = Callable[[int], list[Result]]


@dataclass(frozen=True)
class PairCosts:
    """What passes over one row cost.

    Attributes:
        seconds: M → seconds of a target pass over M positions.
        v: the same in units of that over one position.
        c: a draft pass in the same unit.
    """

    seconds: dict[int, float]
    v: dict[int, float]
    c: float

    def speed_up(self, alpha: float, gamma: int) -> float:
        """What gamma proposals a step gain if each is accepted with probability alpha.

        Theorem 3.8 of https://arxiv.org/abs/2211.17192, with a measured v in place of 1: 1 + alpha
        + … + alpha^gamma tokens a step, for gamma c + v(gamma + 1) passes over one position.
        """
        tokens = sum(alpha**n for n in range(gamma + 1))
        return tokens / (gamma * self.c + self.v[gamma + 1])

    @classmethod
    def of(cls, seconds: dict[int, float], draft: float) -> PairCosts:
        """From seconds of the target's passes and of the draft's."""
        return cls(seconds, {m: s / seconds[1] for m, s in seconds.items()}, draft / seconds[1])


def pair_costs(
    subject: Subject,
    prompts: Sequence[str],
    points: Sequence[int],
    seconds: float,
    needed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PairCosts:
    """Measures passes over one row.

    Args:
        subject: the pair.
        prompts: the row's source is as long as the median of these.
        points: positions of the target's passes; with `seconds` and `needed` as of `ladder`.
        seconds: for these.
        needed: how many points are measured in any case.
        clock: seconds.
    """
    source = source_length(subject, prompts)
    target = timer(subject.target, clock, source=source, slots=max(points))
    passes, draft = ladder(target, points, seconds, needed), drafting(subject.draft, clock, source)
    return PairCosts.of(passes, statistics.median([draft(1) for _ in range(1 + DRAFT_ROUNDS)][1:]))


def source_length(subject: Subject, prompts: Sequence[str]) -> int:
    """Source tokens of a prompt of median length."""
    return statistics.median_high(len(subject.tokenizer.encode(prompt)) for prompt in prompts)


def figures(timed: Timed, regular: Timed) -> dict[str, Any]:
    """What a variant took and made; counts are means over the repeats, as auto may vary.

    Args:
        timed: its times; outcomes are lists of results.
        regular: those of regular decoding.
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
    """All results of all repeats; outcomes are lists of them."""
    return [result for row in timed.outcomes for turn in row for result in turn]


def _tokens(timed: Timed) -> list[list[Tokens]]:
    return [[[result.tokens for result in turn] for turn in row] for row in timed.outcomes]
