"""`beams`: what a beam search costs and gives, by the number of its hypotheses.

A few prompts are timed one by one, in turns; quality is judged on more of them, decoded in batches,
as a text does not depend on its batch. One beam is greedy decoding by the target alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks import options, printing, workload
from benchmarks.extras import needed
from benchmarks.figures import measure
from benchmarks.options import REGULAR
from benchmarks.quality import chrf, exact_match, points
from benchmarks.subject import Run, Subject, begin, decoding
from benchmarks.workload import Workload
from mlx_t5.cli.arguments import add_number, add_setting, at_least
from mlx_t5.timing import Ratio, Timed, median_total

COLUMNS: printing.Columns = {
    "K": lambda row: f"{row['num_beams']}",
    "ms a step": lambda row: f"{row['milliseconds']:.2f}",
    "v(K) (range)": lambda row: str(row["v"]),
    "steps a text": lambda row: f"{row['steps']:.1f}",
    "time a text (range)": lambda row: str(row["time"]),
    "exact match": points("exact_match"),
    "chrF": points("chrf"),
}
NOTES = (
    "v(K): a step with K beams, in steps of greedy decoding; time a text: likewise, in its texts, "
    "encoding included. Medians over the repeats, with the range of whole repeats."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 6, "mixed")
    add_setting(parser, "--num-beams", default=[1, 2, 4, 8], help="1 is always among them")
    add_setting(parser, "--length-penalty", help="of the searches")
    add_number(
        parser, "--quality-count", type=at_least(1), default=200, help="prompts that are judged"
    )
    add_number(
        parser, "--quality-batch", type=at_least(1), default=8, help="decoded together there"
    )
    options.add_measuring(parser, 3)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints."""
    needed("sacrebleu")
    prompts = workload.chosen(args.task, args.prompts, args.count)
    judged = workload.chosen(args.task, args.prompts, args.quality_count)
    subject, facts = begin(args, command, ["sacrebleu"], judged=len(judged.prompts))
    numbers = sorted({1, *args.num_beams})
    turns = workload.cut(prompts.prompts, 1)
    ways: dict[Any, Callable[[int], Run]] = {
        n: subject.runs(REGULAR, 0, turns, **search(n, args)) for n in numbers
    }
    timed, _ = measure(ways, len(turns), args.repeats)
    rows = [
        {"num_beams": n, **costs(timed[n], timed[1]), **quality(subject, judged, n, args)}
        for n in numbers
    ]
    print(f"\n{printing.markdown(COLUMNS, rows)}\n\n{NOTES}")
    printing.write_record(args.json, {"command": command, "environment": facts, "rows": rows})
    return 0


def search(num_beams: int, args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a way."""
    own = {"num_beams": num_beams, "length_penalty": args.length_penalty}
    return own | {"max_tokens": args.max_tokens}


def costs(timed: Timed, greedy: Timed) -> dict[str, Any]:
    """What the steps and the texts of a way cost, beside those of greedy decoding."""
    steps, own = step_seconds(timed), step_seconds(greedy)
    results = [r for row in timed.outcomes for run in row for r in run.results]
    texts, base = ([sum(row) for row in each.seconds] for each in (timed, greedy))
    return {
        "milliseconds": 1e3 * median_total([[s] for s in steps]),
        "v": ratio(steps, own),
        "steps": sum(r.stats.target_calls for r in results) / len(results),
        "time": ratio(texts, base),
    }


def step_seconds(timed: Timed) -> list[float]:
    """[R] seconds of a step in each repeat."""
    stats = [[r.stats for run in row for r in run.results] for row in timed.outcomes]
    return [sum(s.decode_seconds for s in row) / sum(s.target_calls for s in row) for row in stats]


def ratio(seconds: list[float], base: list[float]) -> Ratio:
    """How many times as long as `base`, by medians and by the single repeats; both [R]."""
    single = [ours / theirs for ours, theirs in zip(seconds, base, strict=True)]
    medians = (median_total([[s] for s in each]) for each in (seconds, base))
    ours, theirs = medians
    return Ratio(ours / theirs, min(single), max(single))


def quality(
    subject: Subject, judged: Workload, num_beams: int, args: argparse.Namespace
) -> dict[str, float | None]:
    """How good a way's texts are; None where the right ones are not known."""
    turn = decoding(
        subject.regular(), [judged.prompts], args.quality_batch, **search(num_beams, args)
    )
    texts, right = [result.text or "" for result in turn(0)], judged.references
    if right is None:
        return {"exact_match": None, "chrf": None}
    return {"exact_match": exact_match(texts, right), "chrf": chrf(texts, right)}
