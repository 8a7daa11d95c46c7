"""Whether a draft pays: every way of proposing, predicted from its costs and measured.

A way proposes gamma tokens a step, of which each is kept with probability alpha. What that should
gain follows from what passes cost (`theory.speed_up`), and so does the gamma to take. What it gains
is measured beside regular decoding, in turns. Only what is measured counts in the end: theory knows
of passes alone, and a tiny model's host work is as large.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_t5.drafting import theory
from mlx_t5.drafting.costs import Costs
from mlx_t5.requests import Result
from mlx_t5.sizes import Columns, markdown, percent
from mlx_t5.timing import Ratio, speed_up, take_turns

Decode = Callable[[int], list[Result]]

MOST_PROPOSALS = 9  # that are considered
BUDGET_SECONDS = 60.0  # for measuring, about
LEAST_TURNS, REPEATS = 4, 3
REGULAR, LOOKUP = "", "lookup"  # names: of no way, and of copying
NEAR = 0.02  # ways whose speeds differ by less are taken for equally fast
WIDTHS = (2, 4, 5, 6, 8)  # positions of which v is shown


@dataclass(frozen=True)
class Counts:
    """What became of the proposals of some texts, decoded one at a time.

    Attributes:
        acceptance: accepted / drafted; None if nothing was drafted.
        tokens_per_call: tokens decided a pass of the target.
        alpha: the probability that a proposal is kept.
        decided: tokens, EOS included.
    """

    acceptance: float | None
    tokens_per_call: float
    alpha: float
    decided: int = 0

    @classmethod
    def of(cls, results: Sequence[Result]) -> Counts:
        """Adds up the counts of results."""
        stats = [result.stats for result in results]
        drafted, accepted = (sum(getattr(s, n) for s in stats) for n in ("drafted", "accepted"))
        calls = sum(s.target_calls for s in stats)
        decided = sum(round(s.tokens_per_call * s.target_calls) for s in stats)
        told = [s.speculation for s in stats]
        alpha = theory.acceptance_probability(
            theory.added([each.drafted_by_position for each in told]),
            theory.added([each.accepted_by_position for each in told]),
        )
        share = accepted / drafted if drafted else None
        return cls(share, decided / max(calls, 1), alpha or 0.0, decided)


def typical(results: Sequence[Result]) -> Sequence[Result]:
    """The texts that came to an end; all texts if these are fewer than half.

    A text without end mostly repeats itself: it is the longest by far, and guessed either
    altogether or not at all. A few of them would decide which draft is the best.
    """
    ended = [result for result in results if result.finish_reason == "stop"]
    return ended if 2 * len(ended) >= len(results) else results


@dataclass(frozen=True)
class Way:
    """One way of proposing, and how it fared.

    Attributes:
        name: what to give as --draft-model.
        num_draft: gamma; 0 for regular decoding.
        counts: what became of the proposals.
        c: cost of a draft pass, in target passes over one position; 0 without a draft.
        predicted: times as fast as regular decoding, by theory.
        measured: the same, measured.
    """

    name: str
    num_draft: int
    counts: Counts
    c: float
    predicted: float
    measured: Ratio


def judge(
    decoding: Callable[[str, int], Decode], costs: Mapping[str, Costs], num_draft: int, most: int
) -> tuple[list[Way], int]:
    """Measures every way beside regular decoding, each with the gamma that suits it.

    Args:
        decoding: what decodes the prompt of a turn by a way, with so many proposals; with 0, by no
            way.
        costs: of each way's passes, by its name.
        num_draft: proposals by which alpha is estimated.
        most: turns there are.

    Returns:
        The ways, and on how many prompts they were measured.
    """
    regular = decoding("", 0)
    regular(0)
    began = time.perf_counter()
    regular(0)
    share = BUDGET_SECONDS / (len(costs) + 1) / (REPEATS + 2) / (time.perf_counter() - began)
    turns = min(most, max(LEAST_TURNS, int(share)))
    chosen: dict[str, tuple[int, float]] = {}
    for name, each in costs.items():
        decode = decoding(name, num_draft)
        counts = Counts.of([result for turn in range(turns) for result in decode(turn)])
        chosen[name] = best_num_draft(counts.alpha, each)
    running = {REGULAR: regular} | {n: decoding(n, gamma) for n, (gamma, _) in chosen.items()}
    timed = take_turns(running, turns, REPEATS, lambda results: Counts.of(results).decided)
    ways = []
    for name, (gamma, predicted) in chosen.items():
        counts = Counts.of([r for turn in timed[name].outcomes[0] for r in turn])
        gain = speed_up(timed[REGULAR], timed[name])
        ways.append(Way(name, gamma, counts, relative(costs[name])[0], predicted, gain))
    return ways, turns


def best_num_draft(alpha: float, costs: Costs) -> tuple[int, float]:
    """The gamma that should gain most, and how much that is.

    Args:
        alpha: probability that a proposal is kept.
        costs: of the pair's passes; without a draft's for copies.
    """
    c, v = relative(costs)
    gains = {g: theory.speed_up(alpha, g, c, v) for g in range(1, MOST_PROPOSALS + 1)}
    best = max(gains.values())
    gamma = min(g for g, gain in gains.items() if gain >= (1 - NEAR / 2) * best)
    return gamma, gains[gamma]


def relative(costs: Costs) -> tuple[float, Mapping[int, float]]:
    """c, and v(M) up to what `MOST_PROPOSALS` takes."""
    one = costs.verify(1, 1)
    v = {m: costs.verify(1, m) / one for m in range(1, MOST_PROPOSALS + 2)}
    return costs.draft_pass(1) / one, v


def recommended(ways: Sequence[Way], new: str) -> Way | None:
    """The way to take; None if none is faster than regular decoding.

    Args:
        ways: without regular decoding.
        new: the name of the new draft, which has to be faster than the others to replace them.
    """
    useful = [way for way in ways if way.counts.acceptance]  # else what is faster is chance
    fastest = max((way.measured.value for way in useful), default=0.0)
    if fastest <= 1 + NEAR:
        return None
    near = [way for way in useful if way.measured.value >= (1 - NEAR) * fastest]
    return min(near, key=lambda way: (way.name == new, -way.measured.value))


def report(ways: Sequence[Way], costs: Costs, new: str, prompts: int) -> str:
    """What the user is told at the end.

    Args:
        ways: all but regular decoding.
        costs: of the target and the new draft.
        new: its name.
        prompts: how many were decoded.
    """
    columns: Columns = {
        "--draft-model": lambda row: row["way"].name,
        "--num-draft": lambda row: str(row["way"].num_draft or ""),
        "acceptance": lambda row: percent(row["way"].counts.acceptance),
        "tokens/call": lambda row: f"{row['way'].counts.tokens_per_call:.2f}",
        "c": lambda row: f"{row['way'].c:.3f}" if row["way"].c else "",
        "predicted": lambda row: f"{row['way'].predicted:.2f}",
        "measured (range)": lambda row: str(row["way"].measured),
    }
    regular = Way("none", 0, Counts(None, 1.0, 0.0), 0.0, 1.0, Ratio(1.0, 1.0, 1.0))
    table = markdown(columns, [{"way": way} for way in (regular, *ways)])
    v = relative(costs)[1]
    return (
        f"{table}\n\n{prompts} held-out prompts, one at a time, relative to regular decoding. "
        "Predicted is of decoding alone, from c, what a draft pass costs, and v(M), what a target "
        f"pass over M positions does: {', '.join(f'v({m}) = {v[m]:.2f}' for m in WIDTHS)}.\n\n"
        f"{advice(ways, new)}"
    )


def advice(ways: Sequence[Way], new: str) -> str:
    """The line that says what to use."""
    best = recommended(ways, new)
    if best is None:
        return "keep --draft-model none: no way of proposing is faster than regular decoding here"
    line = f"--draft-model {best.name} --num-draft {best.num_draft}, {best.measured} times as fast"
    if best.name == LOOKUP:
        return f"keep to copying, without a draft: {line}"
    return f"recommended: {line}" if best.name == new else f"keep what you have: {line}"
