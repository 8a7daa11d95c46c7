"""`speed`: regular and speculative decoding of the same prompts, beside what theory predicts.

What passes of both models cost is measured in the same turns as the decoding, so that a change of
the machine's speed strikes both. Encoding and decoding are timed apart; theory speaks of decoding.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import options, report, theory, workload
from benchmarks.compare import differing, same
from benchmarks.costs import PLACES, CostMeter, Costs, copy_bandwidth, weights_read
from benchmarks.options import AUTO
from benchmarks.subject import (
    DRAFT,
    REGULAR,
    WAYS,
    Passes,
    Subject,
    begin,
    counts,
    decided,
    decoding,
)
from benchmarks.timing import Timed, speed_up, spread, take_turns
from benchmarks.workload import Workload
from decoder import SpeculativeDecoder
from results import Result

COSTS = "costs"  # the name under which measuring them takes its turn
LONGEST = 16  # v(M) is measured up to here at least, which is what auto uses at most
CHAIN = 4  # draft passes in a row where the number of proposals varies

WHERE: report.Columns = {
    "machine": lambda row: row["machine"],
    "mlx": lambda row: row["mlx"],
    "dtype": lambda row: row["dtype"],
    "prompts": lambda row: f"{row['count']} {row['set']}",
    "way": lambda row: row["way"],
}
TIMES: report.Columns = WHERE | {
    "encode ms/prompt": lambda row: str(row["encode_ms"]),
    "decode ms/token": lambda row: str(row["decode_ms"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "speed-up": lambda row: str(row["speed_up"]),
    "weights MB/token": lambda row: f"{row['bytes_per_token'] / 1e6:.1f}",
    "GB/s": lambda row: f"{row['bandwidth'] / 1e9:.1f}",
    "of copying": lambda row: f"{row['bandwidth'] / row['copy_bandwidth']:.0%}",
    "peak MB": lambda row: f"{row['peak_memory_bytes'] / 1e6:.0f}",
    "same": lambda row: same(row["different"]),
}
THEORY: report.Columns = WHERE | {
    "tokens/call": lambda row: f"{row['tokens_per_call']:.2f}",
    "alpha": lambda row: f"{row['alpha']:.3f}",
    "c": lambda row: f"{row['c']:.3f}",
    "v": lambda row: f"{row['v']:.2f}",
    "predicted by alpha": lambda row: f"{row['predicted']:.2f}",
    "by tokens/call": lambda row: f"{row['predicted_by_calls']:.2f}",
    "decoding measured": lambda row: str(row["decode_speed_up"]),
    "of predicted": lambda row: f"{row['decode_speed_up'].value / row['predicted']:.2f}",
    "of that by tokens/call": lambda row: (
        f"{row['decode_speed_up'].value / row['predicted_by_calls']:.2f}"
    ),
}
NOTES = (
    "All times are medians, with the range of the repeats; ms/token counts the end token, as a "
    "pass decides it too. Speed-up is of encoding and decoding. Both models are in memory "
    "throughout. c is what a draft pass costs, v what verifying a step's positions does, in "
    "regular passes. Predicted by alpha: every proposal kept with that probability; by "
    "tokens/call: with the tokens that passes really yielded, which are fewer where a text ends "
    "in the middle of a step."
)


@dataclass
class Run:
    """What a turn of decoding made.

    Attributes:
        results: of its prompts.
        widths: positions → passes of the target.
        draft_passes: passes of the draft.
    """

    results: list[Result]
    widths: Counter
    draft_passes: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 20, ["translate", "fix"])
    options.add_num_draft(parser, [3, 5, 7, AUTO])
    add = parser.add_argument
    add("--way", choices=WAYS, default=DRAFT, help="what proposes (default: %(default)s)")
    options.add_measuring(parser, 5)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if texts differ in float32."""
    subject, facts = begin(args, command, repeats=args.repeats)
    copying = copy_bandwidth()
    print(f"copying a large array: {spread([each / 1e9 for each in copying])} GB/s")
    sets, rows = [], []
    for task in [None] if args.prompts else list(dict.fromkeys(args.task)):
        prompts = workload.chosen(task, args.prompts, args.count, args.seed)
        timed = measure(subject, prompts, args)
        costs = Costs.of([each for row in timed.pop(COSTS).outcomes for each in row])
        where = {**facts, "set": prompts.name, "count": len(prompts.prompts)}
        where["copy_bandwidth"] = statistics.median(copying)
        rows += [where | row for row in summarise(subject, timed, costs)]
        sets.append({"set": prompts.name, "costs": costs})
        print(f"\n{prompts.name}: what passes cost\n\n{costs_table(costs)}", flush=True)
    speculative = [row for row in rows if row["way"] != REGULAR]
    print(f"\n{report.markdown(TIMES, rows)}\n\n{report.markdown(THEORY, speculative)}\n\n{NOTES}")
    record = {"command": command, "environment": facts, "copying": copying, "sets": sets}
    report.write_json(args.json, {**record, "rows": rows})
    return int(any(row["different"] for row in rows) and facts["dtype"] == "float32")


def measure(subject: Subject, prompts: Workload, args: argparse.Namespace) -> dict[str, Timed]:
    """Lets all decoders and the measuring of costs take turns; outcomes: `Run`s and `Round`s."""
    decoders = {REGULAR: subject.counted(None)}
    for gamma in args.num_draft:
        decoders[f"{args.way} {gamma}"] = subject.counted(args.way, gamma)
    lengths = [CHAIN if n == AUTO else n for n in args.num_draft]
    return run_turns(decoders, prompts, cost_meter(subject, prompts, lengths, PLACES), args)


def run_turns(
    decoders: dict[Any, tuple[SpeculativeDecoder, Passes, Passes]],
    prompts: Workload,
    meter: CostMeter,
    args: argparse.Namespace,
) -> dict[Any, Timed]:
    """Lets decoders, as `Subject.counted` makes them, and a meter take turns, a prompt each."""
    cut = [[prompt] for prompt in prompts.prompts]
    ways: dict[Any, Callable[[int], Any]] = {
        name: counting(decoding(decoder, cut, 1, max_tokens=args.max_tokens), target, draft)
        for name, (decoder, target, draft) in decoders.items()
    }
    ways[COSTS] = lambda turn: meter.measure()
    return take_turns(
        ways,
        len(cut),
        args.repeats,
        lambda outcome: decided(outcome.results) if isinstance(outcome, Run) else 1,
    )


def cost_meter(
    subject: Subject, prompts: Workload, lengths: Sequence[int], places: Sequence[int] = ()
) -> CostMeter:
    """What measures costs for sources as long as these prompts and so many proposals a step."""
    source = statistics.median_high(len(subject.tokenizer.encode(p)) for p in prompts.prompts)
    longest = max(LONGEST, *(gamma + 1 for gamma in lengths))
    return CostMeter(subject.target, subject.draft, source, longest, sorted(set(lengths)), places)


def counting(
    decode: Callable[[int], list[Result]], target: Passes, draft: Passes
) -> Callable[[int], Run]:
    """The same with the passes that a turn took."""

    def run(turn: int) -> Run:
        target.widths.clear()
        draft.widths.clear()
        results = decode(turn)
        return Run(results, Counter(target.widths), draft.widths.total())

    return run


def summarise(subject: Subject, timed: dict[str, Timed], costs: Costs) -> list[dict]:
    """The figures of every way."""
    read = weights_read(subject.target), weights_read(subject.draft)
    regular = timed[REGULAR]
    return [
        {"way": way}
        | times(each, regular)
        | bandwidth(each, *read)
        | ({} if way == REGULAR else prediction(each, costs, way.split(" ")[-1]))
        for way, each in timed.items()
    ]


def times(timed: Timed, regular: Timed) -> dict:
    """Times, and whether the texts are those of regular decoding."""
    texts, others = (
        [[run.results for run in row] for row in each.outcomes] for each in (timed, regular)
    )
    encode = [1e3 * sum(row) / len(row) for row in phase(timed, "encode").seconds]
    return {
        "encode_ms": spread(encode),
        "decode_ms": spread([1e3 * s for s in phase(timed, "decode").repeats_a_token()]),
        "tokens_per_second": 1 / timed.seconds_a_token(),
        "speed_up": speed_up(regular, timed),
        "decode_speed_up": speed_up(phase(regular, "decode"), phase(timed, "decode")),
        "different": differing(texts, others),
        "peak_memory_bytes": max(r.stats.peak_memory_bytes for r in _results(timed)),
        "seconds": timed.seconds,
        "encode_seconds": phase(timed, "encode").seconds,
        "decode_seconds": phase(timed, "decode").seconds,
        "tokens": timed.tokens,
        **counts(_results(timed)),
    }


def phase(timed: Timed, name: str) -> Timed:
    """The time of "encode" or "decode" alone; every turn has one prompt."""
    rows = [[getattr(run.results[0].stats, f"{name}_seconds") for run in r] for r in timed.outcomes]
    return Timed(rows, timed.tokens, timed.outcomes)


def bandwidth(timed: Timed, target: int, draft: int) -> dict:
    """Weights read a token, and a second of decoding.

    Args:
        timed: outcomes are runs.
        target: bytes that a pass of the target reads.
        draft: bytes that a pass of the draft reads.
    """
    runs = [run for row in timed.outcomes for run in row]
    read = sum(run.widths.total() * target + run.draft_passes * draft for run in runs)
    per_token = read / sum(map(sum, timed.tokens))
    return {
        "bytes_per_token": per_token,
        "bandwidth": per_token / phase(timed, "decode").seconds_a_token(),
    }


def prediction(timed: Timed, costs: Costs, num_draft: str) -> dict:
    """What theory makes of the counts and the costs; speed-ups are of decoding."""
    c = costs.c[CHAIN if num_draft == AUTO else int(num_draft)]
    runs = [run for row in timed.outcomes for run in row]
    widths = sum((run.widths for run in runs), Counter())
    passes, draft_passes = widths.total(), sum(run.draft_passes for run in runs)
    told = [result.stats.speculation for run in runs for result in run.results]
    places = (
        theory.added([getattr(each, name) for each in told])
        for name in ("drafted_by_position", "accepted_by_position")
    )
    alpha = theory.acceptance_probability(*places) or 0.0
    spent = theory.cost(widths, draft_passes, c, costs.v)
    tokens = sum(map(sum, timed.tokens))
    return {
        "tokens_per_call": tokens / passes,
        "alpha": alpha,
        "c": c if draft_passes else 0.0,
        "v": sum(count * costs.v[width] for width, count in widths.items()) / passes,
        "predicted": theory.promised_tokens(alpha, widths) / spent,
        "predicted_by_calls": tokens / spent,
        "widths": dict(sorted(widths.items())),
        "draft_passes": draft_passes,
    }


def costs_table(costs: Costs) -> str:
    """What a target pass takes, v(M), c, and what a token takes after so many others."""
    columns: dict[str, Callable[[dict], str]] = {"": lambda row: row["name"]}
    for width in costs.seconds:
        columns[f"M = {width}"] = lambda row, width=width: row["cells"][width]
    rows = [
        {"name": "ms", "cells": {m: f"{1e3 * s:.2f}" for m, s in costs.seconds.items()}},
        {"name": "v(M)", "cells": {m: f"{v:.2f}" for m, v in costs.v.items()}},
    ]
    passes = ", ".join(f"{c:.3f} with {n} proposals" for n, c in costs.c.items())
    after = ", ".join(f"{1e3 * s:.2f} after {n}" for n, s in costs.places.items())
    least, most = min(costs.places.values()), max(costs.places.values())
    return (
        f"{report.markdown(columns, rows)}\n\nc = {passes}\n\n"
        f"ms of a target pass over one position: {after} tokens; from least to most "
        f"{most / least - 1:+.0%}"
    )


def _results(timed: Timed) -> Sequence[Result]:
    return [result for row in timed.outcomes for run in row for result in run.results]
