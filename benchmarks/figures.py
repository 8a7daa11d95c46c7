"""Lets decoders take turns with the measuring of costs, and works out each decoder's figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.costs import CostMeter, PairCosts
from benchmarks.subject import Run, Subject, counts, decided
from benchmarks.workload import Workload
from mlx_t5.drafting import theory
from mlx_t5.engine.rows import Result
from mlx_t5.timing import Timed, Tokens, differing, median_total, speed_up, take_turns

COSTS = "costs"  # the name under which measuring them takes its turn
Decode = Callable[[int], Run]


def measure(
    ways: Mapping[Any, Decode], turns: int, repeats: int, meter: CostMeter | None = None
) -> tuple[dict[Any, Timed], PairCosts | None]:
    """Times every way, and the passes between them, so that a slower machine strikes both.

    Args:
        ways: by name, as `Subject.runs` makes them.
        turns: how many they have.
        repeats: how often each is done after a warm-up.
        meter: of the passes' costs; None to leave them out.

    Returns:
        The times of each way by its name, and what passes cost; None without a meter.
    """
    measuring: dict[Any, Callable[[int], Any]] = dict(ways)
    if meter:
        measuring[COSTS] = lambda turn: meter.measure()

    def tokens(outcome: Any) -> int:
        return decided(outcome.results) if isinstance(outcome, Run) else 1

    timed = take_turns(measuring, turns, repeats, tokens)
    costs = (
        PairCosts.from_rounds([each for row in timed.pop(COSTS).outcomes for each in row])
        if meter
        else None
    )
    return timed, costs


def cost_meter(subject: Subject, prompts: Workload, num_draft: Sequence[int | str]) -> CostMeter:
    """What measures costs for sources as long as these prompts and so many proposals a step."""
    source = statistics.median_high(len(subject.tokenizer.encode(p)) for p in prompts.prompts)
    longest = max((n for n in num_draft if isinstance(n, int)), default=0)
    return CostMeter(subject.target, subject.draft, source, longest)


def figures(timed: Timed, regular: Timed, greedy: bool = True) -> dict[str, Any]:
    """What a way took and made; counts are means over the repeats, as auto may vary.

    Args:
        timed: its times; outcomes are runs.
        regular: those of regular decoding.
        greedy: whether texts have to be regular decoding's.
    """
    repeats, results = len(timed.seconds), _results(timed)
    total = counts(results)
    return {
        **{name: count / repeats for name, count in total.items()},
        "tokens_per_second": 1 / timed.seconds_a_token(),
        "speed_up": speed_up(regular, timed),
        "tokens_per_call": total["decided"] / total["target_calls"],
        "acceptance_rate": total["accepted"] / total["drafted"] if total["drafted"] else None,
        "steps_by_accepted": [count / repeats for count in steps_by_accepted(results)],
        "different": differing(_tokens(timed), _tokens(regular)) if greedy else None,
        "seconds": timed.seconds,
        "tokens": timed.tokens,
    }


def beside_theory(timed: Timed, regular: Timed, costs: PairCosts) -> dict[str, Any]:
    """The speed-up of decoding that theory makes of acceptance and costs, and the measured one.

    Where all steps have gamma proposals the prediction is theory.py's S(gamma).

    Args:
        timed: a way's times; outcomes are runs of a row at a time.
        regular: those of regular decoding.
        costs: of passes over one row.
    """
    runs = [run for row in timed.outcomes for run in row]
    widths = sum((run.widths for run in runs), Counter[int]())
    alpha = theory.acceptance_probability(*by_position(_results(timed))) or 0.0
    draft_passes = sum(run.draft_passes for run in runs)
    spent = theory.cost(widths, draft_passes, costs.c, costs.v)
    return {
        "alpha": alpha,
        "c": costs.c if draft_passes else 0.0,
        "predicted": theory.promised_tokens(alpha, widths) / spent,
        "decode_speed_up": speed_up(decoding_alone(regular), decoding_alone(timed)),
    }


def by_position(results: Sequence[Result]) -> tuple[list[int], list[int]]:
    """Number of steps with a first, second, … proposal, and how many of these were accepted."""
    told = [result.stats.speculation for result in results]
    drafted = theory.added([each.drafted_by_position for each in told])
    return drafted, theory.added([each.accepted_by_position for each in told])


def steps_by_accepted(results: Sequence[Result]) -> list[int]:
    """How many steps accepted 0, 1, … proposals; a step of a batch counts for each of its rows."""
    at_least = [counts(results)["target_calls"], *by_position(results)[1]]
    return [a - b for a, b in zip(at_least, [*at_least[1:], 0], strict=True)]


def decoding_alone(timed: Timed) -> Timed:
    """The same without the time for encoding, where rows are decoded one at a time."""
    outcomes = timed.outcomes
    rows = [[sum(r.stats.decode_seconds for r in run.results) for run in row] for row in outcomes]
    return Timed(rows, timed.tokens, outcomes)


def of_best(row: dict, fixed: Sequence[dict]) -> float:
    """A way's speed as a share of that of the best fixed number.

    The fastest of several noisy rows looks faster than it is. So the number is chosen by one half
    of the repeats and compared in the other, and the same the other way round.

    Args:
        row: the way's figures.
        fixed: those of the fixed numbers.
    """
    repeats = range(len(row["seconds"]))
    even, odd = repeats[::2], repeats[1::2] or repeats
    shares = []
    for chosen_by, compared in ((even, odd), (odd, even)):
        speeds = [(_speed(other, chosen_by), _speed(other, compared)) for other in fixed]
        shares.append(_speed(row, compared) / max(speeds)[1])
    return sum(shares) / 2


def _speed(row: dict, repeats: Sequence[int]) -> float:
    """Tokens a second in some of the repeats."""
    tokens, seconds = (median_total([row[k][r] for r in repeats]) for k in ("tokens", "seconds"))
    return tokens / seconds


def _results(timed: Timed) -> list[Result]:
    return [result for row in timed.outcomes for run in row for result in run.results]


def _tokens(timed: Timed) -> list[list[Tokens]]:
    return [[[result.tokens for result in run.results] for run in row] for row in timed.outcomes]
