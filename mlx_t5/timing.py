"""Times several variants of the same work, interleaved, and compares the times.

On a shared machine the speed changes from second to second, so only times measured shortly after
each other are compared. The work is cut into turns, usually of one prompt: all variants do the
first turn, then all do the second, and so on, each turn in a new random order. The whole work
is repeated R times. Each repeat gives one ratio of two variants' times. The speed-up is the median
of these ratios, reported with the smallest and the largest. The time of a variant is the sum over
its turns of the median over the repeats.

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

WARM_UP = -1  # number of the repeat that is not counted
Tokens = list[list[int]]  # the tokens of each prompt of a turn
Columns = Mapping[str, Callable[[dict], str]]  # of a table: title → function that writes a figure


@dataclass(frozen=True)
class Ratio:
    """The median of a figure over several repeats, with the smallest and the largest value."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Timed:
    """The times and outcomes of one variant, in R repeats of N turns."""

    seconds: list[list[float]] = field(default_factory=list)  # [R][N], wall clock
    tokens: list[list[int]] = field(default_factory=list)  # [R][N], EOS included
    outcomes: list[list[Any]] = field(default_factory=list)  # [R][N]

    def add(self, repeat: Sequence[tuple[float, int, Any]]) -> None:
        """Adds one repeat: the result of `timed_turn` for every turn."""
        self.seconds.append([seconds for seconds, _, _ in repeat])
        self.tokens.append([tokens for _, tokens, _ in repeat])
        self.outcomes.append([outcome for _, _, outcome in repeat])

    def only(self, turns: Sequence[int]) -> Timed:
        figures: Any = self.seconds, self.tokens, self.outcomes
        return Timed(*([[row[turn] for turn in turns] for row in rows] for rows in figures))

    def seconds_a_token(self) -> float:
        """Computed from the medians over the repeats."""
        return median_total(self.seconds) / median_total(self.tokens)

    def repeats_a_token(self) -> list[float]:
        return [sum(s) / sum(t) for s, t in zip(self.seconds, self.tokens, strict=True)]


def median_total(rows: Sequence[Sequence[float]]) -> float:
    """The sum over turns of the median over repeats; `rows` has a row per repeat."""
    return sum(statistics.median(turn) for turn in zip(*rows, strict=True))


def speed_up(base: Timed, other: Timed) -> Ratio:
    """The ratio of tokens per second, `other` to `base`: its median and range over the repeats."""
    pairs = zip(base.repeats_a_token(), other.repeats_a_token(), strict=True)
    return spread([slow / fast for slow, fast in pairs])


def spread(repeats: Sequence[float]) -> Ratio:
    return Ratio(statistics.median(repeats), min(repeats), max(repeats))


def differing(first: Sequence[Sequence[Tokens]], second: Sequence[Sequence[Tokens]]) -> int:
    """Counts the prompts whose tokens differ in at least one repeat of two `Timed.outcomes`."""
    flat = ([[tokens for turn in row for tokens in turn] for row in o] for o in (first, second))
    prompts = zip(*(zip(*rows, strict=True) for rows in flat), strict=True)
    return sum(texts != other_texts for texts, other_texts in prompts)


def order(names: Iterable[str], repeat: int, turn: int) -> list[str]:
    """A random order of variants: a new one per turn and repeat, the same in every run."""
    # In a fixed order, even a rotated one, each variant would follow the same one: the two would
    # share the machine's slow moments, and the second would find the first one's caches.
    names = list(names)
    return random.Random(f"{repeat} {turn}").sample(names, len(names))


def interleave(
    variants: Mapping[Any, Callable[[int], Any]],
    turns: int,
    repeats: int,
    tokens: Callable[[Any], int],
    clock: Callable[[], float] = time.perf_counter,
    warm_up: bool = True,
) -> dict[Any, Timed]:
    """Runs every variant on every turn, `repeats` times, after a warm-up that is not counted.

    Args:
        variants: functions by name. A function gets a turn's number, does the turn, and returns
            the outcome; MLX must have finished computing it.
        turns: number of turns.
        repeats: number of repeats, at least 1.
        tokens: counts the tokens of an outcome.
        clock: returns seconds.
        warm_up: False if all variants have run before.
    """
    timed = {name: Timed() for name in variants}
    for repeat in range(WARM_UP if warm_up else 0, repeats):
        turn_times: dict[Any, list] = {name: [] for name in variants}
        for turn in range(turns):
            for name in order(variants, repeat, turn):
                turn_times[name].append(timed_turn(variants[name], turn, tokens, clock))
        if repeat != WARM_UP:
            for name, rows in turn_times.items():
                timed[name].add(rows)
    return timed


def timed_turn(
    variant: Callable[[int], Any],
    turn: int,
    tokens: Callable[[Any], int],
    clock: Callable[[], float],
) -> tuple[float, int, Any]:
    began = clock()
    outcome = variant(turn)
    return clock() - began, tokens(outcome), outcome


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def markdown(columns: Columns, rows: Sequence[dict]) -> str:
    """A Markdown table that is readable in a terminal, too."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[write(row) for write in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
