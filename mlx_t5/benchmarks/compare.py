"""`compare`: measures every proposer (draft, lookup, both) relative to regular decoding.

Every text, greedy or sampled, is compared token by token with the text of regular decoding. With
batch size 1 and temperature 0, the costs of passes of both models are measured as well.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from mlx_t5.benchmarks import pictures, printing, workload
from mlx_t5.benchmarks.figures import MEASURED_POSITIONS, figures, pair_costs
from mlx_t5.benchmarks.subject import Subject, begin, decided, decoding
from mlx_t5.benchmarks.workload import DRAFT, PROPOSERS, REGULAR, Workload
from mlx_t5.cli.arguments import Option, at_least, num_draft, setting
from mlx_t5.drafting.named import split_name
from mlx_t5.settings import AUTO
from mlx_t5.timing import interleave


def _rounded(counts: Sequence[float]) -> str:
    return " ".join(f"{count:.0f}" for count in counts)


COLUMNS: printing.Columns = {
    **printing.WAY,
    **printing.SPEED,
    **printing.TOKENS_PER_CALL,
    **printing.ACCEPTANCE,
    "steps that accepted 0, 1, …": lambda row: _rounded(row["steps_by_accepted"]),
    "steps that proposed 0, 1, …": lambda row: _rounded(row["steps_by_length"]),
    **printing.TEXTS,
}
COSTS_SECONDS = 10.0  # approximate time for measuring the cost of the target's passes
NOTES = (
    "Speed-up: over regular decoding in the same run, encoding included, the median of the repeats "
    "and their range. tokens/s use the median time of each prompt and count the end token, as a "
    "pass decides it too. c is the cost of a draft pass and v(M) the cost of a target pass over M "
    "positions, relative to a target pass over one position."
)


OPTIONS = {
    **workload.MODELS,
    **workload.prompts(8, ("translate", "fix")),
    "num_draft": num_draft(
        group="what is compared",
        help="numbers of proposals per step, or auto",
        default=(2, 3, 4, 5, 6, 7, 8, AUTO),
        several=True,
    ),
    "ways": Option("proposers", PROPOSERS, PROPOSERS, several=True, default_text="all"),
    "predictions": Option(
        "also measure with predictions, with and without proposers: the target's own greedy texts, "
        "with this percentage of their words changed",
        (),
        at_least(0),
        metavar="PERCENT",
        several=True,
    ),
    "wrong": Option(
        "also measure a draft with this percentage of its proposals made wrong",
        (),
        at_least(0),
        metavar="PERCENT",
        several=True,
    ),
    "temp": setting("temp", help="temperatures, one table each", default=(0.0,), several=True),
    "batch_size": setting(
        "batch_size", help="rows decoded together, one table each", default=(1,), several=True
    ),
    "picture": Option("draw speed over --num-draft", kind=Path, metavar="FILE"),
    **workload.measuring(3),
}


def run_compare(args: argparse.Namespace, command: str) -> int:
    sets = workload.workloads(args)
    subject, facts = begin(args, command)
    if subject.draft is None:
        args.ways = [way for way in args.ways if split_name(way)[0] != DRAFT]
        if not args.ways or args.wrong:
            subject.require_draft()
    tables: list[dict] = []
    for temp in args.temp:
        for batch_size in args.batch_size:
            for prompts in sets:
                for table in proposer_tables(subject, prompts, temp, batch_size, args):
                    print(
                        f"\n{proposer_text(table, subject.target.weights_read().bytes)}", flush=True
                    )
                    tables.append(table)
    if args.picture:
        pictures.draw_ways(tables, f"{printing.facts_line(facts)}\n{command}", args.picture)
    print(f"\n{NOTES}")
    printing.write_record(args.json, {"command": command, "environment": facts, "tables": tables})
    differs = any(row["different"] for table in tables for row in table["rows"])
    return int(differs and facts["dtype"] == "float32")


def proposer_tables(
    subject: Subject, prompts: Workload, temp: float, batch_size: int, args: argparse.Namespace
) -> Iterator[dict]:
    """Decodes the prompts with every proposer in turn, and yields tables of the figures."""
    single = batch_size == 1 and temp == 0
    turns = workload.cut(prompts.prompts, 1 if single else len(prompts.prompts))
    common = {"max_tokens": args.max_tokens, "temp": temp}
    ways: list[tuple[str, str, int, Any]] = [(way, way, 0, None) for way in args.ways]
    ways += [(f"{DRAFT}, {percent} % wrong,", DRAFT, percent, None) for percent in args.wrong]
    if args.predictions:
        decoder = subject.decoder(DRAFT if subject.draft else REGULAR)
        results = decoder.results(prompts.prompts, decoder.request(max_tokens=args.max_tokens))
        own = [str(result.text) for result in results]
    for percent in args.predictions:
        label = f"prediction {percent} % changed,"
        texts = workload.cut(workload.changed(own, percent), len(turns[0]))
        ways += [(f"{way}, {label}", way, 0, texts) for way in (REGULAR, *args.ways)]
    names: dict[tuple[str, int | str], str] = {(REGULAR, 0): REGULAR}
    variants = {REGULAR: decoding(subject.decoder(REGULAR), turns, batch_size, **common)}
    for (way, proposer, wrong, texts), n in itertools.product(ways, args.num_draft):
        names[way.removesuffix(","), n] = name = f"{way} {n}"
        decoder = subject.decoder(proposer, n, wrong=wrong)
        variants[name] = decoding(decoder, turns, batch_size, texts, **common)
    timed = interleave(variants, len(turns), args.repeats, decided)
    longest = max([MEASURED_POSITIONS, *(n + 1 for n in args.num_draft if isinstance(n, int))])
    points, costs = range(1, longest + 1), None
    if single:
        costs = pair_costs(subject, prompts.prompts, points, COSTS_SECONDS, longest)
    positions = {task: prompts.positions(task) for task in dict.fromkeys(prompts.tasks)}
    for task, chosen in positions.items() if single else [(prompts.name, [0])]:
        of_task = {name: times.only(chosen) for name, times in timed.items()}
        yield {
            "task": task if task == prompts.name else f"{task}, in a mixed run",
            "temp": temp,
            "batch_size": batch_size,
            "count": len(chosen) if single else len(prompts.prompts),
            "repeats": args.repeats,
            "rows": [
                {"proposer": proposer, "num_draft": n, "way": name}
                | figures(of_task[name], of_task[REGULAR])
                for (proposer, n), name in names.items()
            ],
            "costs": costs,
        }


def proposer_text(table: dict, weights: int) -> str:
    how = f"temp {table['temp']:g}, batch {table['batch_size']}, {table['repeats']} repeats"
    title = f"{table['task']}: {table['count']} prompts, {how}"
    parts = [title, printing.markdown(COLUMNS, table["rows"])]
    if costs := table["costs"]:
        rows: list[dict] = [
            {"M": "ms", **{m: f"{1e3 * s:.2f}" for m, s in costs.seconds.items()}},
            {"M": "v(M)", **{m: f"{v:.2f}" for m, v in costs.v.items()}},
        ]
        columns = {str(title): itemgetter(title) for title in ("M", *costs.seconds)}
        speed = f"{weights / 1e6:.1f} MB of weights, {weights / costs.seconds[1] / 1e9:.1f} GB/s"
        parts.append(printing.markdown(columns, rows))
        parts.append("" if costs.c is None else f"c = {costs.c:.3f}")
        parts.append(f"A target pass over one position reads {speed}.")
    return "\n\n".join(filter(None, parts))
