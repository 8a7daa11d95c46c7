"""`compare`: all ways of proposing beside regular decoding, and beside what theory predicts.

Greedy outputs are compared token by token; sampled texts differ from way to way, as they may. With
one row at a time, what passes of both models cost is measured in the same turns as the decoding,
so that a change of the machine's speed strikes both, and the speed-up that follows from these costs
stands beside the measured one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from benchmarks import options, printing, workload
from benchmarks.costs import PairCosts, weights_read
from benchmarks.figures import beside_theory, cost_meter, figures, measure, of_best
from benchmarks.options import REGULAR, WAYS
from benchmarks.subject import Run, Subject, begin
from benchmarks.workload import Workload
from mlx_t5.cli.arguments import add_setting
from mlx_t5.settings import AUTO
from mlx_t5.timing import Timed

COLUMNS: printing.Columns = {
    **printing.WAY,
    **printing.SPEED,
    "of best": lambda row: f"{row['of_best']:.2f}" if row["of_best"] else "",
    **printing.TOKENS_PER_CALL,
    **printing.ACCEPTANCE,
    "steps that accepted 0, 1, …": lambda row: histogram(row["steps_by_accepted"]),
    **printing.TEXTS,
}
NOTES = (
    "Speed-up: over regular decoding in the same turns, encoding included, the median of the "
    "repeats and their range; tokens/s are by the median time of each prompt, and count the end "
    "token, as a pass decides it too. Predicted and measured below v(M) and c are of decoding "
    "alone. Of best: speed as a "
    "share of the best fixed number's of the same way, which is chosen by one half of the repeats "
    "and compared in the other. c is what a draft pass costs, v(M) what a target pass over M "
    "positions does, in target passes over one."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 8, ["translate", "fix"])
    options.add_num_draft(parser, [2, 3, 4, 5, 6, 7, 8, AUTO])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="default: all")
    add_setting(parser, "--temp", default=[0.0], help="one table each")
    add_setting(parser, "--batch-size", default=[1], help="rows in flight, one table each")
    options.add_measuring(parser, 3)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if greedy texts differ in float32."""
    tasks = [None] if args.prompts else list(dict.fromkeys(args.task))
    sets = [workload.chosen(task, args.prompts, args.count) for task in tasks]
    subject, facts = begin(args, command)
    tables: list[dict] = []
    for temp in args.temp:
        for batch_size in args.batch_size:
            for prompts in sets:
                for table in compare(subject, prompts, temp, batch_size, args):
                    print(f"\n{table_text(table, weights_read(subject.target))}", flush=True)
                    tables.append(table)
    print(f"\n{NOTES}")
    printing.write_record(args.json, {"command": command, "environment": facts, "tables": tables})
    differs = any(row["different"] for table in tables for row in table["rows"])
    return int(differs and facts["dtype"] == "float32")


def compare(
    subject: Subject, prompts: Workload, temp: float, batch_size: int, args: argparse.Namespace
) -> Iterator[dict]:
    """Runs every way on the prompts: a table for each task that can be told apart.

    At batch 1 a turn is a prompt, so the tasks of mixed prompts are reported separately; a larger
    batch decodes them together, and so they are one.
    """
    single = batch_size == 1
    turns = workload.cut(prompts.prompts, 1 if single else len(prompts.prompts))
    common = {"max_tokens": args.max_tokens, "temp": temp}
    numbers: dict[tuple[str, int | str], str] = {(REGULAR, 0): REGULAR}
    numbers |= {(way, n): f"{way} {n}" for way in args.ways for n in args.num_draft}
    ways: dict[str, Callable[[int], Run]] = {
        name: subject.runs(way, n, turns, batch_size, **common)
        for (way, n), name in numbers.items()
    }
    meter = cost_meter(subject, prompts, args.num_draft) if single else None
    timed, costs = measure(ways, len(turns), args.repeats, meter)
    parts = {task: prompts.positions(task) for task in dict.fromkeys(prompts.tasks)}
    for task, places in parts.items() if single else [(prompts.name, [0])]:
        part = {name: each.only(places) for name, each in timed.items()}
        yield {
            "task": task if task == prompts.name else f"{task}, in a mixed run",
            "temp": temp,
            "batch_size": batch_size,
            "count": len(places) if single else len(prompts.prompts),
            "repeats": args.repeats,
            "rows": rows_of(numbers, part, temp == 0, costs),
            "costs": costs,
        }


def rows_of(
    numbers: dict[tuple[str, int | str], str],
    timed: dict[str, Timed],
    greedy: bool,
    costs: PairCosts | None,
) -> list[dict]:
    """The figures of every way and number, which `numbers` names; `of_best` None for regular."""
    regular = timed[REGULAR]
    rows = [
        {"proposer": way, "num_draft": n, "way": name, **figures(timed[name], regular, greedy)}
        for (way, n), name in numbers.items()
    ]
    for row in rows:
        own = [other for other in rows if other["proposer"] == row["proposer"] != REGULAR]
        fixed = [other for other in own if other["num_draft"] != AUTO]
        row["of_best"] = of_best(row, fixed) if fixed else None
        if costs and row["proposer"] != REGULAR:
            row |= beside_theory(timed[row["way"]], regular, costs)
    return rows


def table_text(table: dict, weights: int) -> str:
    """A table as it is printed; `weights` are the bytes that a target pass reads."""
    title = (
        f"{table['task']}: {table['count']} prompts, temp {table['temp']:g}, batch "
        f"{table['batch_size']}, {table['repeats']} repeats"
    )
    parts = [title, printing.markdown(COLUMNS, table["rows"])]
    if costs := table["costs"]:
        proposing = [row for row in table["rows"] if row["proposer"] != REGULAR]
        theory = printing.markdown({**printing.WAY, **printing.THEORY}, proposing)
        parts += [costs_table(costs, weights), theory]
    return "\n\n".join(parts)


def costs_table(costs: PairCosts, weights: int) -> str:
    """What passes cost."""

    def cell(width: int) -> Callable[[dict], str]:
        return lambda row: row["cells"][width]

    columns: dict[str, Callable[[dict], str]] = {"M": lambda row: row["name"]}
    columns |= {str(width): cell(width) for width in costs.seconds}
    rows = [
        {"name": "ms", "cells": {m: f"{1e3 * s:.2f}" for m, s in costs.seconds.items()}},
        {"name": "v(M)", "cells": {m: f"{v:.2f}" for m, v in costs.v.items()}},
    ]
    return (
        f"{printing.markdown(columns, rows)}\n\nc = {costs.c:.3f}; a target pass over one position "
        f"reads {weights / 1e6:.1f} MB of weights, {weights / costs.seconds[1] / 1e9:.1f} GB/s"
    )


def histogram(steps: Sequence[float]) -> str:
    """How many steps accepted 0, 1, … proposals."""
    return " ".join(f"{count:.0f}" for count in steps)
