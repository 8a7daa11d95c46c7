"""Times several variants of the same work, interleaved, and compares the times.

On a shared machine the speed of everything changes from second to second, so two variants are only
compared by times that were taken next to each other. The work is cut into turns, usually one
prompt each: every variant does the first turn, then every one the second, and so on, all of it as
often as there are repeats, in an order that changes every time. Two variants are compared repeat by
repeat: their speed-up is the median of these ratios, between the least and the greatest. Of a
variant by itself the median time of each turn counts, and their sum is the variant's time.

Texts may differ between variants if they are sampled, so what is compared is the time a token.

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
    """A figure of several repeats: the median, the least and the greatest."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Timed:
    """What one variant took and made.

    Attributes:
        seconds: [R][N] wall clock of every turn.
        tokens: [R][N] tokens that were decided in it, EOS included.
        outcomes: [R][N] what the variant returned.
    """

    seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    outcomes: list[list[Any]] = field(default_factory=list)

    def add(self, repeat: Sequence[tuple[float, int, Any]]) -> None:
        """Adds a repeat: seconds, tokens and outcome of every turn, as `timed_turn` has them."""
        self.seconds.append([seconds for seconds, _, _ in repeat])
        self.tokens.append([tokens for _, tokens, _ in repeat])
        self.outcomes.append([outcome for _, _, outcome in repeat])

    def only(self, turns: Sequence[int]) -> Timed:
        """The same of these turns alone."""

        def chosen(rows: list[list[Any]]) -> list[list[Any]]:
            return [[row[turn] for turn in turns] for row in rows]

        return Timed(chosen(self.seconds), chosen(self.tokens), chosen(self.outcomes))

    def seconds_a_token(self) -> float:
        """Seconds of all turns, each by the median of its repeats, divided by their tokens."""
        return median_total(self.seconds) / median_total(self.tokens)

    def repeats_a_token(self) -> list[float]:
        """[R] seconds a token of each repeat."""
        return [sum(s) / sum(t) for s, t in zip(self.seconds, self.tokens, strict=True)]


def median_total(rows: Sequence[Sequence[float]]) -> float:
    """The sum over turns of the median over repeats, of [R][N] figures."""
    return sum(statistics.median(turn) for turn in zip(*rows, strict=True))


def speed_up(base: Timed, other: Timed) -> Ratio:
    """How many times as many tokens a second `other` makes as `base`, repeat by repeat."""
    pairs = zip(base.repeats_a_token(), other.repeats_a_token(), strict=True)
    return spread([slow / fast for slow, fast in pairs])


def spread(repeats: Sequence[float]) -> Ratio:
    """Median, least and greatest of the single repeats."""
    return Ratio(statistics.median(repeats), min(repeats), max(repeats))


def differing(outcomes: Sequence[Sequence[Tokens]], others: Sequence[Sequence[Tokens]]) -> int:
    """How many prompts got other tokens at least once; both [R][N] of the tokens of each prompt."""
    flat = ([[tokens for turn in row for tokens in turn] for row in o] for o in (outcomes, others))
    prompts = zip(*(zip(*rows, strict=True) for rows in flat), strict=True)
    return sum(texts != other_texts for texts, other_texts in prompts)


def order(names: Iterable[str], repeat: int, turn: int) -> list[str]:
    """Who goes when: shuffled anew for every turn of every repeat, the same in every run.

    In a fixed order, rotated or not, neighbours would stay neighbours: the same variants would
    share the machine's slow moments, and find the caches as the same other one left them.
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
        variants: by name, what does a turn, given its number. It returns when its result can be
            read on the host.
        turns: N.
        repeats: R, at least 1.
        tokens: how many tokens an outcome has.
        clock: seconds.
        before: called before every turn of every variant, outside its time.
        warm_up: whether there is one; without it all variants have run before.
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
    """Seconds, tokens and outcome of one turn; arguments as of `interleave`."""
    began = clock()
    outcome = variant(turn)
    return clock() - began, tokens(outcome), outcome
