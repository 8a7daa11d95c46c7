"""Whether a draft pays: every proposer, predicted from its costs and measured.

A proposer gives gamma tokens a step, of which each is accepted with probability alpha. What that
should gain follows from what passes cost (`theory.speed_up`), and so does the gamma to take. What
it gains is measured beside regular decoding, interleaved. Only what is measured counts in the end:
theory knows of passes alone, and a tiny model's host work is as large.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_t5.drafting import theory
from mlx_t5.drafting.costs import Costs
from mlx_t5.drafting.tally import Tally
from mlx_t5.engine.rows import Result
from mlx_t5.sizes import Columns, markdown, percent
from mlx_t5.timing import Ratio, interleave, speed_up

Decode = Callable[[int], list[Result]]

MOST_PROPOSALS = 9  # that are considered
BUDGET_SECONDS = 60.0  # for measuring, about
LEAST_TURNS, REPEATS = 4, 3
REGULAR, LOOKUP = "", "lookup"  # names: of no proposer, and of copying
NEAR = 0.02  # proposers whose speeds differ by less are taken for equally fast
WIDTHS = (2, 4, 5, 6, 8)  # positions of which v is shown


def typical(results: Sequence[Result]) -> Sequence[Result]:
    """The texts that came to an end; all texts if these are fewer than half.

    A text without end mostly repeats itself: it is the longest by far, and guessed either
    altogether or not at all. A few of them would decide which draft is the best.
    """
    ended = [result for result in results if result.finish_reason == "stop"]
    return ended if 2 * len(ended) >= len(results) else results


@dataclass(frozen=True)
class Proposer:
    """What proposes, and how it fared.

    Attributes:
        name: what to give as --draft-model.
        num_draft: gamma; 0 for regular decoding.
        acceptance: accepted / drafted; None if nothing was drafted.
        tokens_per_call: tokens decided a pass of the target.
        c: cost of a draft pass, in target passes over one position; 0 without a draft.
        predicted: speed-up over regular decoding, by theory.
        measured: the same, measured.
    """

    name: str
    num_draft: int
    acceptance: float | None
    tokens_per_call: float
    c: float
    predicted: float
    measured: Ratio


def measure_proposers(
    decoding: Callable[[str, int], Decode], costs: Mapping[str, Costs], num_draft: int, most: int
) -> tuple[list[Proposer], int]:
    """Measures every proposer beside regular decoding, each with the gamma that suits it.

    Args:
        decoding: what decodes the prompt of a turn with a proposer's so many proposals; with 0,
            regularly.
        costs: of each proposer's passes, by its name.
        num_draft: proposals by which alpha is estimated.
        most: turns there are.

    Returns:
        The proposers, and on how many prompts they were measured.
    """
    regular = decoding(REGULAR, 0)
    regular(0)
    began = time.perf_counter()
    regular(0)
    share = BUDGET_SECONDS / (len(costs) + 1) / (REPEATS + 2) / (time.perf_counter() - began)
    turns = min(most, max(LEAST_TURNS, int(share)))
    chosen: dict[str, tuple[int, float]] = {}
    for name in costs:
        decode = decoding(name, num_draft)
        tally = Tally.of([result for turn in range(turns) for result in decode(turn)])
        chosen[name] = best_num_draft(tally.alpha, costs[name])
    variants = {REGULAR: regular} | {n: decoding(n, gamma) for n, (gamma, _) in chosen.items()}
    timed = interleave(variants, turns, REPEATS, lambda results: Tally.of(results).decided)
    proposers = []
    for name, (gamma, predicted) in chosen.items():
        tally = Tally.of([r for turn in timed[name].outcomes[0] for r in turn])
        gain, c = speed_up(timed[REGULAR], timed[name]), relative(costs[name])[0]
        counts = tally.acceptance, tally.tokens_per_call
        proposers.append(Proposer(name, gamma, *counts, c, predicted, gain))
    return proposers, turns


def best_num_draft(alpha: float, costs: Costs) -> tuple[int, float]:
    """The gamma that should gain most, and how much that is.

    Args:
        alpha: probability that a proposal is accepted.
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


def recommended(proposers: Sequence[Proposer], new: str) -> Proposer | None:
    """The one to take; None if none is faster than regular decoding.

    Args:
        proposers: without regular decoding.
        new: the name of the new draft, which has to be faster than the others to replace them.
    """
    useful = [p for p in proposers if p.acceptance]  # else what is faster is chance
    fastest = max((p.measured.value for p in useful), default=0.0)
    if fastest <= 1 + NEAR:
        return None
    near = [p for p in useful if p.measured.value >= (1 - NEAR) * fastest]
    return min(near, key=lambda p: (p.name == new, -p.measured.value))


def report(
    proposers: Sequence[Proposer], costs: Costs, new: str, prompts: int, public: str | None = None
) -> str:
    """What is printed at the end.

    Args:
        proposers: without regular decoding.
        costs: of the target and the new draft.
        new: its name.
        prompts: how many were decoded.
        public: the name that the new draft has for others, who have it and can copy, and have
            nothing else of this machine's.
    """
    if public:
        proposers = [p for p in proposers if p.name in (new, LOOKUP)]
        proposers = [replace(p, name=public) if p.name == new else p for p in proposers]
        new = public
    columns: Columns = {
        "--draft-model": lambda row: row["name"],
        "--num-draft": lambda row: str(row["num_draft"] or ""),
        "acceptance": lambda row: percent(row["acceptance"]),
        "tokens/call": lambda row: f"{row['tokens_per_call']:.2f}",
        "c": lambda row: f"{row['c']:.3f}" if row["c"] else "",
        "predicted": lambda row: f"{row['predicted']:.2f}",
        "measured (range)": lambda row: str(row["measured"]),
    }
    regular = Proposer("none", 0, None, 1.0, 0.0, 1.0, Ratio(1.0, 1.0, 1.0))
    table = markdown(columns, [vars(proposer) for proposer in (regular, *proposers)])
    v = relative(costs)[1]
    return (
        f"{table}\n\n{prompts} held-out prompts, one at a time, relative to regular decoding. "
        "Predicted is of decoding alone, from c, what a draft pass costs, and v(M), what a target "
        f"pass over M positions does: {', '.join(f'v({m}) = {v[m]:.2f}' for m in WIDTHS)}.\n\n"
        f"{advice(proposers, new)}"
    )


def advice(proposers: Sequence[Proposer], new: str) -> str:
    """The line that says what to use."""
    best = recommended(proposers, new)
    if best is None:
        return "keep --draft-model none: no way of proposing is faster than regular decoding here"
    line = f"--draft-model {best.name} --num-draft {best.num_draft}, {best.measured} times as fast"
    if best.name == LOOKUP:
        return f"keep to copying, without a draft: {line}"
    return f"recommended: {line}" if best.name == new else f"keep what you have: {line}"
