"""`compare`: all ways of proposing side by side, with regular decoding as the measure.

Greedy outputs are compared token by token. Sampled texts differ from way to way, as they may, so
there the rows say what a token costs, and block verification stands beside token verification.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import options, report, workload
from benchmarks.options import AUTO
from benchmarks.subject import (
    BOTH,
    DRAFT,
    LOOKUP,
    REGULAR,
    WAYS,
    Subject,
    begin,
    counts,
    decided,
    decoding,
)
from benchmarks.timing import Timed, median_total, speed_up, take_turns
from benchmarks.workload import Workload
from results import Result

ONE_BY_ONE = "token by token"

COLUMNS: report.Columns = {
    "way": lambda row: row["way"],
    "tokens/call": lambda row: f"{row['tokens_per_call']:.2f}",
    "target calls": lambda row: f"{row['target_calls']:.0f}",
    "acceptance": lambda row: f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "",
    "tokens/s": lambda row: f"{row['tokens_per_second']:.0f}",
    "speed-up (range)": lambda row: str(row["speed_up"]),
    "same": lambda row: same(row["different"]),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 8, ["translate", "fix"])
    options.add_num_draft(parser, [2, 3, 4, 5, 6, 7, 8, AUTO])
    add = parser.add_argument
    add("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="default: all")
    add(
        "--temp",
        type=options.between(0, 100),
        nargs="+",
        default=[0.0],
        metavar="T",
        help="one table each; above 0 also with token verification (default: 0)",
    )
    add(
        "--batch-size",
        type=options.at_least(1),
        nargs="+",
        default=[1],
        metavar="B",
        help="rows in flight, one table each (default: 1)",
    )
    options.add_measuring(parser, 3)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if greedy texts differ in float32."""
    subject, facts = begin(args, command)
    tasks = [None] if args.prompts else list(dict.fromkeys(args.task))
    tables: list[dict] = []
    for temp in args.temp:
        for batch_size in args.batch_size:
            for task in tasks:
                prompts = workload.chosen(task, args.prompts, args.count, args.seed)
                for table in measure(subject, prompts, temp, batch_size, args):
                    show(table)
                    tables.append(table)
    report.write_json(args.json, {"command": command, "environment": facts, "tables": tables})
    differs = any(row["different"] for table in tables for row in table["rows"])
    return int(differs and facts["dtype"] == "float32")


def show(table: dict) -> None:
    """Prints one table and what it says about auto."""
    print(
        f"\n{table['set']}: {table['count']} prompts, temp {table['temp']:g}, batch "
        f"{table['batch_size']}, {table['repeats']} repeats\n\n"
        f"{report.markdown(COLUMNS, table['rows'])}",
        flush=True,
    )
    if table["auto"]:
        print()
    for verdict in table["auto"]:
        print(
            f"{verdict['way']}: {verdict['of_regular']:.2f} of regular decoding's speed, "
            f"{verdict['of_best']:.2f} of the best fixed number's ({verdict['best']} over all)"
        )


def measure(
    subject: Subject, prompts: Workload, temp: float, batch_size: int, args: argparse.Namespace
) -> Iterator[dict]:
    """Runs every way on the prompts: a table for each prompt set that can be told apart.

    At batch 1 a turn is a prompt, so the sets of mixed prompts are reported separately; a larger
    batch decodes them together, and so they are one set.
    """
    turns = workload.cut(len(prompts.prompts), 1 if batch_size == 1 else len(prompts.prompts))
    cut = [workload.texts(prompts, turn) for turn in turns]
    common = {"max_tokens": args.max_tokens, "temp": temp}
    ways = {
        name: decoding(decoder, cut, batch_size, **common, **extra)
        for name, (decoder, extra) in decoders(subject, args.ways, args.num_draft, temp).items()
    }
    timed = take_turns(ways, len(turns), args.repeats, decided)
    sets = {name: prompts.of(name) for name in dict.fromkeys(prompts.sets)}
    if batch_size > 1:
        sets = {prompts.name: [0]}
    for name, places in sets.items():
        part = {way: each.only(places) for way, each in timed.items()}
        rows = [summarise(way, each, part[REGULAR], temp == 0) for way, each in part.items()]
        yield {
            "set": name if name == prompts.name else f"{name}, in a mixed run",
            "temp": temp,
            "batch_size": batch_size,
            "count": len(places) if batch_size == 1 else len(prompts.prompts),
            "repeats": args.repeats,
            "rows": rows,
            "auto": verdicts(rows),
        }


def decoders(
    subject: Subject, ways: Sequence[str], lengths: Sequence[int | str], temp: float
) -> dict[str, tuple[Any, dict]]:
    """The decoders to compare and their own options, by name; regular decoding is the first."""
    result = {REGULAR: (subject.regular(), {})}
    for way in ways:
        for gamma in lengths:
            result[f"{way} {gamma}"] = (subject.speculative(way, gamma), {})
            # What is copied was drawn from nothing, so there both ways of judging hardly differ.
            if temp > 0 and way == DRAFT:
                own = {"block_verification": False}
                result[f"{way} {gamma}, {ONE_BY_ONE}"] = (subject.speculative(way, gamma), own)
    return result


def summarise(way: str, timed: Timed, regular: Timed, greedy: bool) -> dict:
    """The figures of one way; counts are means over the repeats, as auto may vary.

    Args:
        way: its name.
        timed: its times; outcomes are lists of results.
        regular: those of regular decoding.
        greedy: whether texts have to be regular decoding's.
    """
    repeats = len(timed.seconds)
    each = [counts([r for turn in row for r in turn]) for row in timed.outcomes]
    total = {name: sum(one[name] for one in each) / repeats for name in each[0]}
    return {
        "way": way,
        **total,
        "tokens_per_call": total["decided"] / total["target_calls"],
        "tokens_per_second": 1 / timed.seconds_a_token(),
        "speed_up": speed_up(regular, timed),
        "different": differing(timed.outcomes, regular.outcomes) if greedy else None,
        "seconds": timed.seconds,
        "tokens": timed.tokens,
    }


def differing(
    outcomes: Sequence[Sequence[Sequence[Result]]], others: Sequence[Sequence[Sequence[Result]]]
) -> int:
    """How many prompts got another text than in `others` at least once; both [R][N] of results."""

    def texts(rows: Sequence[Sequence[Sequence[Result]]]) -> list[list[list[int]]]:
        return [[result.tokens for turn in row for result in turn] for row in rows]

    ours, theirs = (zip(*texts(rows), strict=True) for rows in (outcomes, others))
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


def same(different: int | None) -> str:
    """What the table says about the texts."""
    if different is None:
        return "sampled"
    return f"NO: {different}" if different else "yes"


def verdicts(rows: Sequence[dict]) -> list[dict]:
    """How auto did, for each way of proposing that has it and a fixed number to compare with.

    The fastest of several noisy rows looks faster than it is. So the number is chosen by one half
    of the repeats and compared in the other, and the same the other way round.

    Returns:
        `of_best`: its speed as a share of that of the best fixed number, `of_regular` likewise.
    """
    by_way = {row["way"]: row for row in rows}
    result = []
    for way in (DRAFT, LOOKUP, BOTH):
        auto = by_way.get(f"{way} {AUTO}")
        fixed = [row for name, row in by_way.items() if _is_fixed(name, way)]
        if auto and fixed:
            result.append(
                {
                    "way": auto["way"],
                    "best": max(fixed, key=lambda row: row["tokens_per_second"])["way"],
                    "of_best": of_best(auto, fixed),
                    "of_regular": auto["tokens_per_second"] / by_way[REGULAR]["tokens_per_second"],
                }
            )
    return result


def of_best(auto: dict, fixed: Sequence[dict]) -> float:
    """The speed of a row as a share of that of the best others, as `verdicts` says."""
    repeats = range(len(auto["seconds"]))
    even, odd = repeats[::2], repeats[1::2] or repeats
    shares = []
    for chosen_by, compared in ((even, odd), (odd, even)):
        speeds = [(_speed(row, chosen_by), _speed(row, compared)) for row in fixed]
        shares.append(_speed(auto, compared) / max(speeds)[1])
    return sum(shares) / 2


def _speed(row: dict, repeats: Sequence[int]) -> float:
    """Tokens a second in some of the repeats."""
    tokens, seconds = (median_total([row[k][r] for r in repeats]) for k in ("tokens", "seconds"))
    return tokens / seconds


def _is_fixed(name: str, way: str) -> bool:
    return name.startswith(f"{way} ") and name.removeprefix(f"{way} ").isdigit()
