"""What passes cost, measured among the decoding, and the figures of every variant of decoding."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.subject import Run, Subject, decided
from benchmarks.workload import Workload
from mlx_t5.backend import tree_flatten
from mlx_t5.drafting import theory
from mlx_t5.drafting.costs import Costs, drafting, timer
from mlx_t5.drafting.tally import Tally
from mlx_t5.engine.rows import Result
from mlx_t5.timing import Timed, Tokens, differing, interleave, median_total, speed_up
from model import T5

COSTS = "costs"  # the name under which measuring them is interleaved
MEASURED_POSITIONS = 16  # v(M) is measured up to here at least, which is what auto uses at most
Decode = Callable[[int], Run]


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

    @classmethod
    def of(cls, seconds: dict[int, float], draft: float) -> PairCosts:
        """From seconds of the target's passes and of the draft's."""
        return cls(seconds, {m: s / seconds[1] for m, s in seconds.items()}, draft / seconds[1])

    @classmethod
    def from_rounds(cls, rounds: Sequence[Costs]) -> PairCosts:
        """The medians of several measurements."""
        medians = {m: statistics.median(r.target[m] for r in rounds) for m in rounds[0].target}
        return cls.of(medians, statistics.median(r.draft[1] for r in rounds))


class CostMeter:
    """Measures passes over one row whose source has a given length.

    Attributes:
        target_seconds: seconds of a target pass over so many positions.
        draft_seconds: seconds of a draft pass over so many rows.
    """

    def __init__(
        self,
        target: T5,
        draft: T5,
        source: int,
        num_draft: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepares both models.

        Args:
            target: the model that verifies.
            draft: the model that proposes.
            source: source tokens of the row.
            num_draft: the most proposals of a step, if that is more than `MEASURED_POSITIONS` - 1.
            clock: seconds.
        """
        self.longest = max(MEASURED_POSITIONS, num_draft + 1)
        self.target_seconds = timer(target, clock, source=source, slots=self.longest)
        self.draft_seconds = drafting(draft, clock, source=source)

    def measure(self) -> Costs:
        """Measures every pass once."""
        target = {m: self.target_seconds(m) for m in range(1, self.longest + 1)}
        return Costs(target, {1: self.draft_seconds(1)})


def cost_meter(subject: Subject, prompts: Workload, num_draft: Sequence[int | str]) -> CostMeter:
    """What measures costs for sources as long as these prompts and so many proposals a step."""
    longest = max((n for n in num_draft if isinstance(n, int)), default=0)
    source = source_length(subject, prompts.prompts)
    return CostMeter(subject.target, subject.draft, source, longest)


def source_length(subject: Subject, prompts: Sequence[str]) -> int:
    """Source tokens of a prompt of median length."""
    return statistics.median_high(len(subject.tokenizer.encode(prompt)) for prompt in prompts)


def weights_read(model: T5) -> int:
    """Bytes of weights that one pass of the decoder reads.

    That is the decoder without the keys and values of its cross-attention, which are computed once
    a prompt, and the output head: the whole embedding where that is the head.
    """
    arrays = tree_flatten(model.parameters())
    head = "lm_head." if any(name.startswith("lm_head.") for name, _ in arrays) else "shared."
    once = (".cross_attention.k.", ".cross_attention.v.")
    return sum(
        array.nbytes
        for name, array in arrays
        if name.startswith(head)
        or (name.startswith("decoder.") and not any(part in name for part in once))
    )


def measure(
    variants: Mapping[Any, Decode], turns: int, repeats: int, meter: CostMeter | None = None
) -> tuple[dict[Any, Timed], PairCosts | None]:
    """Times every variant, and the passes between them, so that a slower machine strikes both.

    Args:
        variants: by name, as `Subject.runs` makes them.
        turns: how many they have.
        repeats: how often each is done after a warm-up.
        meter: of the passes' costs; None to leave them out.

    Returns:
        The times of each variant by its name, and what passes cost; None without a meter.
    """
    measured: dict[Any, Callable[[int], Any]] = dict(variants)
    if meter:
        measured[COSTS] = lambda turn: meter.measure()

    def tokens(outcome: Any) -> int:
        return decided(outcome) if isinstance(outcome, Run) else 1

    timed = interleave(measured, turns, repeats, tokens)
    if not meter:
        return timed, None
    return timed, PairCosts.from_rounds([r for row in timed.pop(COSTS).outcomes for r in row])


def figures(timed: Timed, regular: Timed, greedy: bool = True) -> dict[str, Any]:
    """What a variant took and made; counts are means over the repeats, as auto may vary.

    Args:
        timed: its times; outcomes are runs.
        regular: those of regular decoding.
        greedy: whether texts have to be regular decoding's.
    """
    repeats, tally = len(timed.seconds), Tally.of(_results(timed))
    counts = {name: n / repeats for name, n in asdict(tally).items() if isinstance(n, int)}
    return {
        **counts,
        "tokens_per_second": 1 / timed.seconds_a_token(),
        "speed_up": speed_up(regular, timed),
        "tokens_per_call": tally.tokens_per_call,
        "acceptance_rate": tally.acceptance,
        "steps_by_accepted": [steps / repeats for steps in steps_by_accepted(tally)],
        "different": differing(_tokens(timed), _tokens(regular)) if greedy else None,
        "seconds": timed.seconds,
        "tokens": timed.tokens,
    }


def steps_by_accepted(tally: Tally) -> list[int]:
    """How many steps accepted 0, 1, … proposals; a step of a batch counts for each of its rows."""
    at_least = [tally.target_calls, *tally.accepted_by_position]
    return [a - b for a, b in zip(at_least, [*at_least[1:], 0], strict=True)]


def beside_theory(timed: Timed, regular: Timed, costs: PairCosts) -> dict[str, Any]:
    """The speed-up of decoding that theory makes of acceptance and costs, and the measured one.

    Where all steps have gamma proposals the prediction is theory.py's S(gamma).

    Args:
        timed: a variant's times; outcomes are runs of a row at a time.
        regular: those of regular decoding.
        costs: of passes over one row.
    """
    runs = [run for row in timed.outcomes for run in row]
    widths = sum((run.widths for run in runs), Counter[int]())
    alpha = Tally.of(_results(timed)).alpha
    draft_passes = sum(run.draft_passes for run in runs)
    spent = theory.cost(widths, draft_passes, costs.c, costs.v)
    return {
        "alpha": alpha,
        "c": costs.c if draft_passes else 0.0,
        "predicted": theory.promised_tokens(alpha, widths) / spent,
        "decode_speed_up": speed_up(without_encoding(regular), without_encoding(timed)),
    }


def without_encoding(timed: Timed) -> Timed:
    """The same times of decoding alone, where rows are decoded one at a time."""
    outcomes = timed.outcomes
    rows = [[sum(r.stats.decode_seconds for r in run.results) for run in row] for row in outcomes]
    return Timed(rows, timed.tokens, outcomes)


def of_best(row: dict, fixed: Sequence[dict]) -> float:
    """A variant's speed as a share of that of the best fixed number.

    The fastest of several noisy rows looks faster than it is. So the number is chosen by one half
    of the repeats and compared in the other, and the same the other way round.

    Args:
        row: the variant's figures.
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
