"""Measures the speed-up of a new draft and of other proposers over regular decoding.

A proposer is a draft, or copying from the prompt. The timed runs of the proposers and of regular
decoding alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlx_t5.engine.rows import Result, Tally
from mlx_t5.timing import Columns, Ratio, interleave, markdown, percent, speed_up

Decode = Callable[[int], list[Result]]

BUDGET_SECONDS = 60.0  # approximate time for measuring
LEAST_TURNS, REPEATS = 4, 3  # a turn decodes one prompt
REGULAR, LOOKUP = "", "lookup"  # the names of regular decoding and of copying
NEAR = 0.02  # speeds that differ by less than this share count as equal


def typical(results: Sequence[Result]) -> Sequence[Result]:
    # A text without an end usually repeats itself, is by far the longest, and is guessed all or not
    # at all: a few of them would decide which draft is the best.
    ended = [result for result in results if result.finish_reason == "stop"]
    return ended if 2 * len(ended) >= len(results) else results


@dataclass(frozen=True)
class Proposer:
    """A value of --draft-model, and its speed-up over regular decoding."""

    name: str
    acceptance: float | None
    tokens_per_call: float
    measured: Ratio


def measure_proposers(
    decoding: Callable[[str], Decode], names: Sequence[str], most: int
) -> tuple[list[Proposer], int]:
    """Measures proposers, each by the decoder that `decoding` makes; also returns the turns."""
    regular = decoding(REGULAR)
    regular(0)
    began = time.perf_counter()
    regular(0)
    share = BUDGET_SECONDS / (len(names) + 1) / (REPEATS + 1) / (time.perf_counter() - began)
    turns = min(most, max(LEAST_TURNS, int(share)))
    variants = {REGULAR: regular} | {name: decoding(name) for name in names}
    timed = interleave(variants, turns, REPEATS, lambda results: Tally.of(results).decided)
    proposers = []
    for name in names:
        tally = Tally.of([result for turn in timed[name].outcomes[-1] for result in turn])
        gain = speed_up(timed[REGULAR], timed[name])
        proposers.append(Proposer(name, tally.acceptance, tally.tokens_per_call, gain))
    return proposers, turns


def report(proposers: Sequence[Proposer], new: str, prompts: int, public: str | None = None) -> str:
    if public:
        proposers = [p for p in proposers if p.name in (new, LOOKUP)]
        proposers = [replace(p, name=public) if p.name == new else p for p in proposers]
        new = public
    columns: Columns = {
        "--draft-model": lambda row: row["name"],
        "acceptance": lambda row: percent(row["acceptance"]),
        "tokens/call": lambda row: f"{row['tokens_per_call']:.2f}",
        "measured (range)": lambda row: str(row["measured"]),
    }
    regular = Proposer("none", None, 1.0, Ratio(1.0, 1.0, 1.0))
    table = markdown(columns, [vars(proposer) for proposer in (regular, *proposers)])
    how = f"{prompts} held-out prompts, one at a time, relative to regular decoding."
    return f"{table}\n\n{how}\n\n{advice(proposers, new)}"


def advice(proposers: Sequence[Proposer], new: str) -> str:
    useful = [p for p in proposers if p.acceptance]  # a speed-up without acceptance is chance
    fastest = max((p.measured.value for p in useful), default=0.0)
    if fastest <= 1 + NEAR:
        return "keep --draft-model none: no proposer is faster than regular decoding here"
    near = [p for p in useful if p.measured.value >= (1 - NEAR) * fastest]
    best = min(near, key=lambda p: (p.name == new, -p.measured.value))
    line = f"--draft-model {best.name}, {best.measured} times as fast"
    if best.name == LOOKUP:
        return f"keep to copying, without a draft: {line}"
    return f"recommended: {line}" if best.name == new else f"keep what you have: {line}"
