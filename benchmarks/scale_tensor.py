"""One step of the target over several ranks: its seconds, what it exchanges, and its memory."""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import printing
from benchmarks.peer_process import Process
from benchmarks.scale_processes import SHARE, ranks_a_core, ratio, together
from benchmarks.scaling import Link, fitted, step_seconds
from mlx_t5.timing import order

WIDTHS = (1, 5)  # positions of a step: without proposals, and with 4
SIZES = (4_096, 65_536, 1_048_576)  # bytes of the collectives by which the link is measured
STEPS, GATHERS = 12, 20  # in a turn; the first is not counted
MEMORY: printing.Columns = {
    "ranks": lambda row: str(row["ranks"]),
    "weights": lambda row: megabytes(row["weights"]),
    "of them on every rank": lambda row: megabytes(row["common"]),
    "promised a rank": lambda row: megabytes(row["promised"]),
    "peak of a rank": lambda row: megabytes(row["peak"]),
    "of promised": lambda row: f"{row['peak'] / row['promised']:.2f}",
}
STEP: printing.Columns = {
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
Groups = Mapping[int, Sequence[Process]]  # how many ranks → they


def memory_table(started: Groups) -> list[dict[str, Any]]:
    """Peak memory of a rank that has loaded its part; prints the table, returns its figures."""
    found = {ranks: together(each, "memory") for ranks, each in started.items()}
    rows = [memory_row(found[1][0]["weights"], each) for each in found.values()]
    how = "resident beyond the imports" if found[1][0]["resident"] else "allocated by MLX"
    print(f"\nTensor parallel: memory of a rank after a step of the target, {how}\n")
    print(printing.markdown(MEMORY, rows))
    return rows


def memory_row(whole: Mapping[str, int], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of so many ranks.

    Args:
        whole: bytes of every parameter of one rank.
        found: of each rank, what `TensorRank.memory` returned.
    """
    ranks, part = len(found), found[0]["weights"]
    common = sum(size for name, size in whole.items() if part[name] == size) if ranks > 1 else 0
    weights = sum(whole.values())
    return {
        "ranks": ranks,
        "weights": weights,
        "common": common,
        "promised": (weights - common) / ranks + common,
        "peak": max(each["peak"] for each in found),
    }


def step_tables(args: argparse.Namespace, started: Groups, links: Sequence[Link]) -> dict[str, Any]:
    """One step of the target over 1, 2, … ranks; prints the tables and returns their figures."""
    steps, work, gathers = measured(args, started)
    found = {
        ranks: fitted({s: statistics.median(gathers[ranks, s]) for s in SIZES}, ranks)
        for ranks in started
        if ranks > 1
    }
    rows = []
    for ranks, processes in started.items():
        sizes = together(processes, "sizes")[0]
        for width in WIDTHS:
            own = work[ranks, width] if ranks > 1 else steps[1, width]
            row = step_row(steps[1, width], steps[ranks, width], own)
            row |= {"ranks": ranks, "ranks_a_core": ranks_a_core(ranks, args.cores), "width": width}
            row |= {"collectives": sizes["collectives"], "bytes": exchanged(sizes, width)}
            rows.append(row | {"predicted": predicted(row, found.get(ranks, NO_LINK))})
    print("\nTensor parallel: a step of the target alone\n")
    print(printing.markdown(STEP, rows))
    for ranks, link in found.items():
        print(f"\nloopback, {ranks} ranks: {told(link)}")
    others = [
        {"ranks": row["ranks"], "width": row["width"], "link": told(link)}
        | {"predicted": predicted(row, link)}
        for row in rows
        for link in links
        if row["ranks"] > 1
    ]
    if others:
        print("\nOther links, from the same work of each rank\n")
        print(printing.markdown(OTHERS, others))
    return {"steps": rows, "links": found, "others": others}


def measured(
    args: argparse.Namespace, started: Groups
) -> tuple[dict[tuple, list[float]], dict[tuple, list[float]], dict[tuple, list[float]]]:
    """Seconds of each repeat: of steps and of a rank's own work by (ranks, positions), and of
    collectives by (ranks, bytes)."""
    steps, work, gathers = (collections.defaultdict[tuple, list[float]](list) for _ in range(3))
    for repeat, width in itertools.product(range(args.repeats), WIDTHS):
        for ranks in map(int, order([str(n) for n in started], repeat, width)):
            measure = partial(typical, started[ranks])
            pair = {"width": width, "count": STEPS}
            steps[ranks, width].append(measure("steps", **pair))
            work[ranks, width].append(measure("steps", **pair, alone=True))
            for size in SIZES if ranks > 1 and width == WIDTHS[0] else ():
                gathers[ranks, size].append(measure("gathers", size=size, count=GATHERS))
    return steps, work, gathers


def typical(processes: Sequence[Process], method: str, **keywords: Any) -> float:
    """The median of rank 0's seconds but the first, which may wait for others to begin."""
    return statistics.median(together(processes, method, **keywords)[0][1:])


def step_row(alone: Sequence[float], own: Sequence[float], work: Sequence[float]) -> dict[str, Any]:
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


def told(link: Link) -> str:
    """A link in words."""
    return f"{1e6 * link.latency:.0f} µs a hop, {link.bandwidth / 1e9:.2f} GB/s"


def megabytes(size: float) -> str:
    """Bytes as the tables write them."""
    return f"{size / 1e6:.0f} MB"
