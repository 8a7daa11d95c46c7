"""`peers`: transformers and CTranslate2 on the same weights and prompts, in the same run.

Each program has a process of its own, as the threads of several in one process slow each other
down, and all have the same number of threads: as many as ours takes. They take turns prompt by
prompt; who has no turn waits for a message.

Threads that spin while they wait take cores from whoever else computes; threads that sleep at once
have to be woken hundreds of times a token. With GNU's OpenMP, which torch and CTranslate2 bring on
Linux, on two cores of an AMD EPYC, CTranslate2 takes 4.1 ms a token at t5-small shape as it comes
and 6.8 with OMP_WAIT_POLICY=passive (torch 14.7 both), but where others compute as well 98 and 10
(torch 138 and 26). Spinning for 0.1 ms costs neither of them anything when they are alone (4.0 and
14.0) and not much otherwise (14 and 32). So that is set in all processes alike (`WAITING`). Threads
of other kinds (OpenBLAS's spin for 0.03 s) come to rest in the pause before each turn.

With --batch-size above 1 a turn is all prompts, so many of them decoded together: throughput.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import options, printing, workload
from benchmarks.options import DRAFT, REGULAR
from benchmarks.peer_process import Process
from benchmarks.peer_systems import Answer
from mlx_t5.cli.arguments import add_number, at_least, between
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO
from mlx_t5.timing import Timed, differing, speed_up, take_turns

GREEDY = "transformers greedy"
ASSISTED = "transformers assisted"
CT2 = "CTranslate2 greedy"
OTHERS = (GREEDY, CT2)  # what every way is compared with, beside regular decoding
OURS = "ours"
PROGRAMS = {  # the classes that run in processes
    OURS: "benchmarks.peer_ours:Ours",
    "transformers": "benchmarks.peer_systems:Transformers",
    "CTranslate2": "benchmarks.peer_systems:CTranslate2",
}
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WAITING = {  # how threads wait for work, unless the user says something else
    "GOMP_SPINCOUNT": "10000",  # GNU's OpenMP: rounds, 0.1 ms or so
    "KMP_BLOCKTIME": "1",  # Intel's and LLVM's: ms
}
Decode = Callable[..., Answer]  # takes the keywords of `Program.timed` but num_draft


def _over(name: str) -> Callable[[dict], str]:
    return lambda row: str(row["over"].get(name, ""))


COLUMNS: printing.Columns = {
    **printing.WAY,
    **printing.SPEED,
    **{f"over {name}": _over(name) for name in OTHERS},
    **printing.TEXTS,
}
DECODING: printing.Columns = {
    **printing.WAY,
    "first token, ms": lambda row: f"{1e3 * row['first_token_seconds']:.1f}",
    "then ms/token": lambda row: f"{1e3 * row['decode_seconds_a_token']:.2f}",
    "speed-up of decoding (range)": lambda row: str(row["decode_speed_up"]),
}
NOTES = (
    "regular and draft are this project's. Speed-ups are of tokens a second, encoding included, "
    "over regular or what the title names. Texts: whether the tokens of all prompts are those of "
    "regular. First token: the time for one token a prompt, encoding and a pass; what the whole "
    "takes beyond it is decoding."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 16, "mixed")
    options.add_num_draft(parser, [5, AUTO], "ours and, if a number, assisted generation's")
    what = "prompts decoded together, one table each"
    add_number(parser, "--batch-size", type=at_least(1), default=[1], help=what)
    what = "seconds before each turn, until other threads rest"
    add_number(parser, "--pause", type=between(0, 60), default=0.15, help=what)
    options.add_measuring(parser, 3)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if our own texts differ in float32."""
    printing.check_writable(args.json)
    prompts = workload.chosen(args.task, args.prompts, args.count).prompts
    tables: list[dict] = []
    with contextlib.ExitStack() as stack:
        pair = {"model": args.model, "draft_model": args.draft_model, "dtype": args.dtype}
        ours = stack.enter_context(start(OURS, {}, **pair))
        facts = ours.call("describe")
        print(printing.header(facts, command, **options.header_fields(args)), flush=True)
        others = start_others(ours, facts, stack)
        programs, missing = describe(others)
        for program in programs.values():
            print(printing.listed(program), flush=True)
        ids = ours.call("encode", texts=prompts)
        processes = {OURS: ours} | {name: others[name] for name in programs}
        ways = every_way(processes, args.num_draft)
        for size in args.batch_size:
            table = compare(ways, ids, size, args)
            table["left_out"] = missing | table["left_out"]
            print(f"\n{written(table, facts['dtype'])}", flush=True)
            tables.append(table)
    print(f"\n{NOTES}")
    record = {"command": command, "environment": facts, "programs": programs, "tables": tables}
    printing.write_record(args.json, record)
    differs = any(row["different"] for table in tables for row in table["rows"] if row["ours"])
    return int(differs and facts["dtype"] == "float32")


def start(name: str, environment: Mapping[str, str], **keywords: Any) -> Process:
    """The process of one of `PROGRAMS`, with more variables than those of how threads wait."""
    waiting = {variable: os.environ.get(variable, usual) for variable, usual in WAITING.items()}
    return Process(PROGRAMS[name], {**environment, **waiting}, quiet=name != OURS, **keywords)


def start_others(
    ours: Process, facts: Mapping[str, Any], stack: contextlib.ExitStack
) -> dict[str, Process]:
    """The processes of the other programs, by name; all have as many threads as ours.

    Args:
        ours: our own, which has the models' folders.
        facts: what it says about itself.
        stack: ends the processes and removes the files that were made for them.
    """
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    target, draft = ours.call("folders", scratch=str(scratch))
    common = {"target": target} | {name: facts[name] for name in ("threads", "dtype", "device")}
    own = {"transformers": {"draft": draft}, "CTranslate2": {"scratch": str(scratch / "ct2")}}
    environment = dict.fromkeys(THREADS, str(facts["threads"]))
    return {
        name: stack.enter_context(start(name, environment, **common, **more))
        for name, more in own.items()
    }


def describe(others: Mapping[str, Process]) -> tuple[dict[str, dict], dict[str, str]]:
    """What each program says about itself, and why others could not be had."""
    programs, missing = {}, {}
    for name, process in others.items():
        try:
            programs[name] = process.call("describe")
        except UserError as error:
            missing[name] = str(error)
    return programs, missing


def every_way(
    processes: Mapping[str, Process], num_draft: Sequence[int | str]
) -> dict[str, Decode]:
    """What decodes, by the name that tables have for it; our own comes first."""
    ours: dict[str, int | str] = {REGULAR: 0}
    ours |= {f"{DRAFT} {n}": n for n in num_draft}
    theirs: dict[str, int | str] = {GREEDY: 0, ASSISTED: AUTO}
    theirs |= {f"{ASSISTED} {n}": n for n in num_draft if n != AUTO}
    numbers: dict[str, dict[str, int | str]] = {
        OURS: ours,
        "transformers": theirs,
        "CTranslate2": {CT2: 0},
    }

    def way(process: Process, n: int | str) -> Decode:
        return lambda **keywords: Answer(**process.call("timed", num_draft=n, **keywords))

    return {
        name: way(process, n)
        for program, process in processes.items()
        for name, n in numbers[program].items()
    }


def is_ours(way: str) -> bool:
    """Whether a way is this project's, by its name in tables."""
    return way == REGULAR or way.startswith(f"{DRAFT} ")


def compare(
    ways: Mapping[str, Decode],
    ids: Sequence[list[int]],
    batch_size: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A table: every way decodes the prompts, in turns if it is one by one.

    Args:
        ways: from `every_way`.
        ids: source tokens of each prompt.
        batch_size: prompts decoded together.
        args: the subcommand's options.
    """
    single = batch_size == 1
    turns = workload.cut(ids, 1 if single else len(ids))
    keywords = {"max_tokens": args.max_tokens, "batch_size": batch_size, "first": single}
    left_out: dict[str, str] = {}
    safe = {name: or_left_out(name, decode, left_out) for name, decode in ways.items()}
    for decode in safe.values():  # a first try, so that no turn waits for what cannot be done
        decode(prompts=turns[0][:2], **keywords)
    timed = take_turns(
        {name: _taking(safe[name], turns, keywords) for name in ways if name not in left_out},
        len(turns),
        args.repeats,
        lambda answer: decided(answer, args.max_tokens) if answer else 0,
        before=lambda: time.sleep(args.pause),
    )
    timed = {name: each for name, each in timed.items() if name not in left_out}
    rows = summarise(timed)
    if single:
        add_decoding(rows, timed)
    return {"batch_size": batch_size, "count": len(ids), "rows": rows, "left_out": left_out}


def or_left_out(name: str, decode: Decode, left_out: dict[str, str]) -> Callable[..., Any]:
    """The same, but once it has failed, why is in `left_out` and all it returns is None.

    Some releases of transformers fail at certain models, such as those with more layers in the
    decoder than in the encoder. Our own failures are not caught.
    """

    def safe(**keywords: Any) -> Answer | None:
        if name in left_out:
            return None
        try:
            return decode(**keywords)
        except UserError as error:
            if is_ours(name):
                raise
            left_out[name] = str(error)
            return None

    return safe


def _taking(decode: Decode, turns: Sequence[Any], keywords: dict[str, Any]) -> Callable[[int], Any]:
    return lambda turn: decode(prompts=turns[turn], **keywords)


def decided(answer: Answer, max_tokens: int) -> int:
    """How many tokens were decided, end tokens included."""
    return sum(min(len(tokens) + 1, max_tokens) for tokens in answer.tokens)


def whole(timed: Timed) -> Timed:
    """Times of encoding and decoding, by each program's own clock; outcomes are the tokens."""
    answers = timed.outcomes
    seconds = [[answer.seconds for answer in row] for row in answers]
    return Timed(seconds, timed.tokens, [[answer.tokens for answer in row] for row in answers])


def first_tokens(timed: Timed) -> Timed:
    """Times of encoding and the first tokens, where these were taken."""
    answers = timed.outcomes
    seconds = [[answer.first_seconds for answer in row] for row in answers]
    return Timed(seconds, [[len(answer.tokens) for answer in row] for row in answers], answers)


def after_first(timed: Timed) -> Timed:
    """Times of decoding alone, where those of the first tokens were taken."""
    all_of_it, first = whole(timed), first_tokens(timed)

    def less(rows: list[list[Any]], others: list[list[Any]]) -> list[list[Any]]:
        return [
            [a - b for a, b in zip(*both, strict=True)] for both in zip(rows, others, strict=True)
        ]

    seconds = less(all_of_it.seconds, first.seconds)
    return Timed(seconds, less(all_of_it.tokens, first.tokens), all_of_it.outcomes)


def summarise(timed: Mapping[str, Timed]) -> list[dict]:
    """The figures of every way; the fastest first.

    Args:
        timed: by name; outcomes are `Answer`s.
    """
    times = {name: whole(each) for name, each in timed.items()}
    regular = times[REGULAR]
    rows = [
        {
            "way": way,
            "speed_up": speed_up(regular, each),
            "over": {name: speed_up(times[name], each) for name in OTHERS if name in times},
            "tokens_per_second": 1 / each.seconds_a_token(),
            "different": differing(each.outcomes, regular.outcomes),
            "ours": is_ours(way),
            "seconds": each.seconds,
            "tokens": each.outcomes[-1],
        }
        for way, each in times.items()
    ]
    return sorted(rows, key=lambda row: -row["tokens_per_second"])


def add_decoding(rows: Sequence[dict], timed: Mapping[str, Timed]) -> None:
    """Adds the figures of decoding alone, if any text has a second token."""
    alone = {name: after_first(each) for name, each in timed.items()}
    if not all(sum(row) for each in alone.values() for row in each.tokens):
        return
    for row in rows:
        first, decoding = first_tokens(timed[row["way"]]), alone[row["way"]]
        row["first_token_seconds"] = first.seconds_a_token()
        row["decode_seconds_a_token"] = decoding.seconds_a_token()
        row["decode_speed_up"] = speed_up(alone[REGULAR], decoding)
        row["first_seconds"] = first.seconds


def written(table: dict, dtype: str) -> str:
    """A table as it is printed, and what has to be known to read it."""
    rows = table["rows"]
    lines = [f"{table['count']} prompts, batch {table['batch_size']}"]
    lines += ["", printing.markdown(COLUMNS, rows)]
    if "decode_speed_up" in rows[0]:
        lines += ["", printing.markdown(DECODING, rows)]
    different = [row["way"] for row in rows if row["different"]]
    if different and dtype == "float32":
        lines += ["", f"Equal texts are to be expected in float32; not so: {', '.join(different)}."]
    elif different:
        lines += ["", f"In {dtype} the two best tokens may be equal to within rounding."]
    if table["left_out"]:
        lines += ["", *(f"left out: {way} ({why})" for way, why in table["left_out"].items())]
    return "\n".join(lines)
