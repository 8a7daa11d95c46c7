"""Times several variants of the same work, interleaved, and compares the times.

On a shared machine speed changes from second to second, so only times taken next to each other are
compared. The work is cut into turns, usually one prompt each: all variants do the first turn, then
all do the second, and so on, in an order that changes every time. All of it is repeated R times.
Two variants are compared repeat by repeat: their speed-up is the median of the ratios, reported
with the smallest and the largest. The time of a single variant is the sum over turns of the median
time of each turn.

Sampled texts may differ between variants, so times are compared per token.

Symbols: R repeats, N turns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_UP = -1  # the repeat that is not counted
Tokens = list[list[int]]  # of the prompts of a turn


@dataclass(frozen=True)
class Ratio:
    """A figure of several repeats: the median, the smallest and the largest."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Timed:
    """The times and outcomes of one variant.

    Attributes:
        seconds: [R][N] wall-clock time of every turn.
        tokens: [R][N] tokens decided in every turn, EOS included.
        outcomes: [R][N] results of the variant.
    """

    seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    outcomes: list[list[Any]] = field(default_factory=list)

    def add(self, repeat: Sequence[tuple[float, int, Any]]) -> None:
        """Adds a repeat: seconds, tokens and outcome of every turn, from `timed_turn`."""
        self.seconds.append([seconds for seconds, _, _ in repeat])
        self.tokens.append([tokens for _, tokens, _ in repeat])
        self.outcomes.append([outcome for _, _, outcome in repeat])

    def only(self, turns: Sequence[int]) -> Timed:
        """Returns the times and outcomes of these turns alone."""

        def chosen(rows: list[list[Any]]) -> list[list[Any]]:
            return [[row[turn] for turn in turns] for row in rows]

        return Timed(chosen(self.seconds), chosen(self.tokens), chosen(self.outcomes))

    def seconds_a_token(self) -> float:
        """The sum of the turns' median seconds, divided by their tokens."""
        return median_total(self.seconds) / median_total(self.tokens)

    def repeats_a_token(self) -> list[float]:
        """[R] seconds a token of each repeat."""
        return [sum(s) / sum(t) for s, t in zip(self.seconds, self.tokens, strict=True)]


def median_total(rows: Sequence[Sequence[float]]) -> float:
    """Returns the sum over turns of the median over repeats, for [R][N] figures."""
    return sum(statistics.median(turn) for turn in zip(*rows, strict=True))


def speed_up(base: Timed, other: Timed) -> Ratio:
    """Returns the speed of `other` in tokens a second relative to `base`, repeat by repeat."""
    pairs = zip(base.repeats_a_token(), other.repeats_a_token(), strict=True)
    return spread([slow / fast for slow, fast in pairs])


def spread(repeats: Sequence[float]) -> Ratio:
    """Returns the median, smallest and largest of the repeats."""
    return Ratio(statistics.median(repeats), min(repeats), max(repeats))


def differing(outcomes: Sequence[Sequence[Tokens]], others: Sequence[Sequence[Tokens]]) -> int:
    """Counts the prompts whose tokens differ in any repeat; both are [R][N] lists of tokens."""
    flat = ([[tokens for turn in row for tokens in turn] for row in o] for o in (outcomes, others))
    prompts = zip(*(zip(*rows, strict=True) for rows in flat), strict=True)
    return sum(texts != other_texts for texts, other_texts in prompts)


def order(names: Iterable[str], repeat: int, turn: int) -> list[str]:
    """Returns the order of variants: shuffled for every turn of every repeat, equal in every run.

    In a fixed order, rotated or not, neighbours would stay neighbours: the same variants would
    share the machine's slow moments, and find the caches as the same predecessor left them.
    """
    names = list(names)
    return random.Random(f"{repeat} {turn}").sample(names, len(names))


def interleave(
    variants: Mapping[Any, Callable[[int], Any]],
    turns: int,
    repeats: int,
    tokens: Callable[[Any], int],
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], None] = lambda: None,
    warm_up: bool = True,
) -> dict[Any, Timed]:
    """Runs every variant on every turn, `repeats` times, after a warm-up that is not counted.

    Args:
        variants: functions by name; each does a turn, given its number, and returns when the
            result can be read on the host.
        turns: N.
        repeats: R, at least 1.
        tokens: returns the number of tokens of an outcome.
        clock: returns seconds.
        before: called before every turn of every variant, outside its time.
        warm_up: whether to warm up; False if all variants have run before.
    """
    timed = {name: Timed() for name in variants}
    for repeat in range(WARM_UP if warm_up else 0, repeats):
        taken: dict[Any, list] = {name: [] for name in variants}
        for turn in range(turns):
            for name in order(variants, repeat, turn):
                before()
                taken[name].append(timed_turn(variants[name], turn, tokens, clock))
        if repeat != WARM_UP:
            for name, rows in taken.items():
                timed[name].add(rows)
    return timed


def timed_turn(
    variant: Callable[[int], Any],
    turn: int,
    tokens: Callable[[Any], int],
    clock: Callable[[], float],
) -> tuple[float, int, Any]:
    """Returns seconds, tokens and outcome of one turn; arguments as in `interleave`."""
    began = clock()
    outcome = variant(turn)
    return clock() - began, tokens(outcome), outcome
