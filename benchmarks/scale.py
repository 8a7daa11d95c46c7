"""`scale`: one file over several ranks, and one model over several ranks, on this machine.

Each rank is a process with cores of its own, as if it were a machine of its own; where the cores
do not suffice for that, the table says so. With data parallel every rank holds the models and does
some of the prompts (main.py --parallel data). With tensor parallel every rank holds a part of the
target and all compute each pass together; what they exchange is timed by itself as well, and the
time of a step that follows from it is set beside the measured one. --latency and --bandwidth say
what other links would give.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import socket
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, options, printing, scale_rank, workload
from benchmarks.peer_process import Process
from benchmarks.scaling import Link, fitted, step_seconds
from mlx_t5.cli.arguments import add_number, at_least, between
from mlx_t5.errors import UserError
from mlx_t5.timing import Ratio, order

DATA, TENSOR = "data", "tensor"
WIDTHS = (1, 5)  # positions of a step: without proposals, and with 4
SIZES = (4_096, 65_536, 1_048_576)  # bytes of the collectives by which the link is measured
STEPS, GATHERS = 12, 20  # in a turn; the first is not counted

SHARE: printing.Columns = {
    "ranks": lambda row: str(row["ranks"]),
    "ranks a core": lambda row: f"{row['ranks_a_core']:g}",
}
DATA_COLUMNS: printing.Columns = {
    **SHARE,
    **printing.SPEED,
    "p50 s": lambda row: f"{row['p50']:.3f}",
    "p95 s": lambda row: f"{row['p95']:.3f}",
    "prompts by rank": lambda row: " ".join(map(str, row["by_rank"])),
    **printing.TEXTS,
}
TENSOR_COLUMNS: printing.Columns = {
    **SHARE,
    "positions": lambda row: str(row["width"]),
    "ms a step": lambda row: f"{1e3 * row['seconds']:.2f}",
    "speed-up (range)": lambda row: str(row["speed_up"]),
    "own work, ms": lambda row: f"{1e3 * row['work']:.2f}",
    "collectives": lambda row: str(row["collectives"]),
    "their share": lambda row: printing.percent(row["share"]),
    "predicted ms": lambda row: f"{1e3 * row['predicted']:.2f}",
    "of predicted": lambda row: f"{row['seconds'] / row['predicted']:.2f}",
}
OTHERS: printing.Columns = {
    "ranks": lambda row: str(row["ranks"]),
    "positions": lambda row: str(row["width"]),
    "link": lambda row: row["link"],
    "predicted ms": lambda row: f"{1e3 * row['predicted']:.2f}",
}
NO_LINK = Link(0, 1)  # of one rank, which exchanges nothing


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this subcommand."""
    options.add_models(parser)
    options.add_prompts(parser, count=64, task="mixed")
    options.add_num_draft(parser, [5])
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
    print(f"\nData parallel: {len(prompts)} prompts, {args.batch_size} at a time on each rank\n")
    data = data_rows(args, prompts)
    print(printing.markdown(DATA_COLUMNS, data))
    tensor = tensor_tables(args, links)
    printing.write_record(args.json, {"facts": facts, DATA: data, **tensor})
    return int(any(row["different"] for row in data))


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


def tensor_tables(args: argparse.Namespace, links: Sequence[Link]) -> dict[str, Any]:
    """One step of the target over 1, 2, … ranks; prints the tables and returns their figures."""
    sets = sorted({1, *args.ranks})
    with contextlib.ExitStack() as stack:
        started = {ranks: stack.enter_context(group(ranks, args)) for ranks in sets}
        sizes = {ranks: together(each, "sizes")[0] for ranks, each in started.items()}
        steps, work, gathers = (collections.defaultdict[tuple, list[float]](list) for _ in range(3))
        for repeat, width in itertools.product(range(args.repeats), WIDTHS):
            for ranks in map(int, order([str(n) for n in sets], repeat, width)):
                measure = partial(typical, started[ranks])
                pair = {"width": width, "count": STEPS}
                steps[ranks, width].append(measure("steps", **pair))
                work[ranks, width].append(measure("steps", **pair, alone=True))
                for size in SIZES if ranks > 1 and width == WIDTHS[0] else ():
                    gathers[ranks, size].append(measure("gathers", size=size, count=GATHERS))
    measured = {
        ranks: fitted({s: statistics.median(gathers[ranks, s]) for s in SIZES}, ranks)
        for ranks in sets
        if ranks > 1
    }
    rows = [
        tensor_row(steps[1, width], steps[n, width], work[n, width] if n > 1 else steps[1, width])
        | {"ranks": n, "ranks_a_core": ranks_a_core(n, args.cores), "width": width}
        | {"collectives": sizes[n]["collectives"], "bytes": exchanged(sizes[n], width)}
        for n in sets
        for width in WIDTHS
    ]
    for row in rows:
        row["predicted"] = predicted(row, measured.get(row["ranks"], NO_LINK))
    print("\nTensor parallel: a step of the target alone\n")
    print(printing.markdown(TENSOR_COLUMNS, rows))
    for ranks, link in measured.items():
        print(f"\nloopback, {ranks} ranks: {told(link)}")
    others = [
        {"ranks": row["ranks"], "width": row["width"], "link": told(link)}
        | {"predicted": predicted(row, link)}
        for row in rows
        for link in links
        if row["ranks"] > 1
    ]
    if others:
        print(
            f"\nOther links, from the same work of each rank\n\n{printing.markdown(OTHERS, others)}"
        )
    return {TENSOR: rows, "links": measured, "others": others}


def typical(processes: Sequence[Process], method: str, **keywords: Any) -> float:
    """The median of rank 0's seconds but the first, which may wait for others to begin."""
    return statistics.median(together(processes, method, **keywords)[0][1:])


def tensor_row(
    alone: Sequence[float], own: Sequence[float], work: Sequence[float]
) -> dict[str, Any]:
    """The figures of a step: of one rank, of these ranks, and of these without collectives."""
    seconds, part = statistics.median(own), statistics.median(work)
    return {
        "seconds": seconds,
        "work": part,
        "share": max(0.0, 1 - part / seconds),
        "speed_up": ratio(alone, own),
    }


def predicted(row: dict[str, Any], link: Link) -> float:
    """Seconds of a step, from a rank's own work and what the ranks exchange."""
    return step_seconds(row["work"], row["ranks"], row["bytes"], link)


def exchanged(sizes: dict[str, int], width: int) -> list[int]:
    """Bytes of a rank in each collective of a step: states, and in the last one logits."""
    states = [width * sizes["state"]] * (sizes["collectives"] - 1)
    return [*states, width * sizes["logits"]] if sizes["collectives"] else []


def ratio(base: Sequence[float], own: Sequence[float]) -> Ratio:
    """How many times as fast, by medians and by the single repeats."""
    single = [theirs / ours for theirs, ours in zip(base, own, strict=True)]
    return Ratio(statistics.median(base) / statistics.median(own), min(single), max(single))


def ranks_a_core(ranks: int, cores: int) -> float:
    """How many ranks share a core; 1 if each has `cores` of its own."""
    return max(1.0, ranks * cores / (os.cpu_count() or 1))


def told(link: Link) -> str:
    """A link in words."""
    return f"{1e6 * link.latency:.0f} µs a hop, {link.bandwidth / 1e9:.2f} GB/s"


@contextlib.contextmanager
def group(ranks: int, args: argparse.Namespace) -> Iterator[list[Process]]:
    """Ranks that share the target, connected in a ring on this machine."""
    what = f"{scale_rank.__name__}:TensorRank"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = Path(folder, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
        several = {"MLX_HOSTFILE": str(hosts)} if ranks > 1 else {"MLX_HOSTFILE": ""}
        yield [
            stack.enter_context(
                Process(
                    what,
                    {"MLX_RANK": str(rank), **several},
                    rank=rank,
                    cores=args.cores,
                    model=args.model,
                    dtype=args.dtype,
                )
            )
            for rank in range(ranks)
        ]


def together(processes: Sequence[Process], method: str, **keywords: Any) -> list[Any]:
    """Calls a method of all processes at the same time."""
    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(lambda each: each.call(method, **keywords), processes))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
