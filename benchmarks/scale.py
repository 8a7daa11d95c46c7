"""`scale`: one file over several ranks, and one model over several ranks, on this machine.

Each rank is a process with cores of its own, as if it were a machine of its own; where the cores
do not suffice for that, the table says so. With data parallel every rank holds the models and does
some of the prompts (main.py --parallel data). With tensor parallel every rank holds a part of the
target and all compute each pass together; what they exchange is timed by itself as well, and the
time of a step that follows from it is set beside the measured one. --latency and --bandwidth say
what other links would give. Whole texts are decoded with the draft on rank 0 and on every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import machine, options, printing, scale_drafts, scale_rank, workload
from benchmarks.peer_process import Process
from benchmarks.scale_processes import SHARE, free_port, group, ranks_a_core, ratio, together
from benchmarks.scale_tensor import memory_table, step_tables
from benchmarks.scaling import Link
from mlx_t5.cli.arguments import add_number, at_least, between
from mlx_t5.errors import UserError
from mlx_t5.timing import order

TABLES = DATA, MEMORY, STEPS, TEXTS = "data", "memory", "steps", "texts"
DATA_COLUMNS: printing.Columns = {
    **SHARE,
    **printing.SPEED,
    "p50 s": lambda row: f"{row['p50']:.3f}",
    "p95 s": lambda row: f"{row['p95']:.3f}",
    "prompts by rank": lambda row: " ".join(map(str, row["by_rank"])),
    **printing.TEXTS,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this subcommand."""
    options.add_models(parser)
    options.add_prompts(parser, count=64, task="mixed")
    options.add_num_draft(parser, [5])
    what = (
        "what to measure: data parallel, or of tensor parallel a rank's memory, a step, whole texts"
    )
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=list(TABLES), help=what)
    what = "ranks, each a process"
    add_number(parser, "--ranks", type=at_least(1), default=[1, 2, 4], help=what)
    what = "cores of each rank, where the system can bind them"
    add_number(parser, "--cores", type=at_least(1), default=1, help=what)
    add_number(parser, "--batch-size", type=at_least(1), default=8, help="prompts at a time")
    what = "seconds of a hop, for predictions of other links, in millionths"
    add_number(parser, "--latency", type=between(0, 1e6), default=[], help=what)
    what = "GB/s of these links, in their order"
    add_number(parser, "--bandwidth", type=between(1e-6, 1e6), default=[], help=what)
    options.add_measuring(parser, repeats=3)


def run(args: argparse.Namespace, command: str) -> int:
    """Runs the subcommand; returns 1 if texts differ that have to be equal."""
    printing.check_writable(args.json)
    prompts = workload.chosen(args.task, args.prompts, args.count).prompts
    facts = machine.environment(args.dtype or "float32")
    if len(args.latency) != len(args.bandwidth):
        raise UserError("--latency and --bandwidth describe links; give as many of both")
    pairs = zip(args.latency, args.bandwidth, strict=True)
    links = [Link(1e-6 * latency, 1e9 * bandwidth) for latency, bandwidth in pairs]
    print(printing.header(facts, command, **options.header_fields(args)))
    found: dict[str, Any] = {DATA: data_table(args, prompts)} if DATA in args.tables else {}
    if {MEMORY, STEPS, TEXTS} & {*args.tables}:
        found |= tensor_tables(args, prompts, links)
    printing.write_record(args.json, {"facts": facts, **found})
    # Of one rank and of several the last digits differ, so ties may break differently.
    apart = any(row["apart"] for row in found.get(TEXTS, []))
    return int(apart or any(row["different"] for row in found.get(DATA, [])))


def data_table(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict]:
    """The file over 1, 2, … ranks; prints the table and returns its figures."""
    rows = data_rows(args, prompts)
    print(f"\nData parallel: {len(prompts)} prompts, {args.batch_size} at a time on each rank\n")
    print(printing.markdown(DATA_COLUMNS, rows))
    return rows


def data_rows(args: argparse.Namespace, prompts: Sequence[str]) -> list[dict]:
    """The file over 1, 2, … ranks, in turns: the first so many of the same processes."""
    names = ("model", "draft_model", "dtype")
    chosen = {name: getattr(args, name) for name in names} | {"cores": args.cores}
    what = f"{scale_rank.__name__}:DataRank"
    settings = {"batch_size": args.batch_size, "max_tokens": args.max_tokens}
    settings |= {"num_draft": args.num_draft[0]}
    runs: dict[int, list[dict]] = {ranks: [] for ranks in args.ranks}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(Process(what, {}, rank=rank, **chosen))
            for rank in range(max(args.ranks))
        ]
        for repeat in range(-1, args.repeats):
            for ranks in map(int, order([str(n) for n in args.ranks], repeat, 0)):
                job = {"ranks": ranks, "port": free_port(), "prompts": list(prompts)}
                found = together(started[:ranks], "run", **job, **settings)[0]
                if repeat >= 0:
                    runs[ranks].append(found)
    base = runs[min(runs)]
    return [data_row(ranks, runs[ranks], base, args.cores) for ranks in args.ranks]


def data_row(ranks: int, runs: list[dict], base: list[dict], cores: int) -> dict[str, Any]:
    """The figures of so many ranks, from repeats of theirs and of the fewest's."""
    seconds = statistics.median(run["seconds"] for run in runs)
    latencies = sorted(itertools.chain.from_iterable(run["latencies"] for run in runs))
    different = {
        i for run in runs for i, own in enumerate(run["tokens"]) if own != base[0]["tokens"][i]
    }
    return {
        "ranks": ranks,
        "ranks_a_core": ranks_a_core(ranks, cores),
        "seconds": [run["seconds"] for run in runs],
        "tokens_per_second": sum(map(len, runs[0]["tokens"])) / seconds,
        "speed_up": ratio([run["seconds"] for run in base], [run["seconds"] for run in runs]),
        "p50": latencies[len(latencies) // 2],
        "p95": latencies[min(int(0.95 * len(latencies)), len(latencies) - 1)],
        "by_rank": runs[-1]["by_rank"],
        "different": len(different),
    }


def tensor_tables(
    args: argparse.Namespace, prompts: Sequence[str], links: Sequence[Link]
) -> dict[str, Any]:
    """The target over 1, 2, … ranks; prints the tables and returns their figures."""
    what = f"{scale_rank.__name__}:TensorRank"
    start = partial(group, what, cores=args.cores, model=args.model, dtype=args.dtype)
    with contextlib.ExitStack() as stack:
        started = {n: stack.enter_context(start(n)) for n in sorted({1, *args.ranks})}
        found: dict[str, Any] = {}
        if MEMORY in args.tables:
            found[MEMORY] = memory_table(started)
        if STEPS in args.tables:
            found |= step_tables(args, started, links)
        if TEXTS in args.tables:
            found[TEXTS] = scale_drafts.table(args, prompts, started)
        return found
