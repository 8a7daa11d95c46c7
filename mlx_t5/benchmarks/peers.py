"""`peers`: measures transformers and CTranslate2 on the same weights and prompts, in the same run.

Each program has its own process, because the threads of several programs in one process slow each
other down. All programs have the same number of threads. They take turns at every prompt, so that
only one program computes at a time.

Waiting threads that spin take cores from other programs. Waiting threads that sleep have to be
woken hundreds of times per token. So waiting threads of OpenMP spin for 0.1 ms and then sleep
(`WAITING`). Those of OpenBLAS spin for 0.03 s. So before each timed turn the program decodes a few
tokens for a longer time (`peer_programs.WARM_UP_SECONDS`): then the other programs' threads are at
rest, and its own threads, caches and cores are as fast as in the middle of a long text.

With --batch-size above 1, a turn decodes all prompts in batches, which measures the throughput.
With --document the prompts are the sentences of one text. This project decodes the text as a
document in the rows "document, regular" and "document, draft N", and sentence by sentence in the
row `regular`. The other programs decode batches of sentences.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_t5.benchmarks import printing, workload
from mlx_t5.benchmarks.peer_process import Process
from mlx_t5.benchmarks.peer_programs import Ids, Timing
from mlx_t5.benchmarks.workload import DRAFT, REGULAR, SAMPLING
from mlx_t5.cli.arguments import Option, at_least, num_draft
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO
from mlx_t5.timing import Timed, differing, interleave, median_total, speed_up

GREEDY = "transformers greedy"
ASSISTED = "transformers assisted"
CT2 = "CTranslate2 greedy"
OTHERS = (GREEDY, CT2)  # besides regular decoding, every variant is compared with these
PROJECT = "this project"
PROGRAMS = {  # the classes that run in processes
    PROJECT: "mlx_t5.benchmarks.peer_programs:MlxT5",
    "transformers": "mlx_t5.benchmarks.peer_programs:Transformers",
    "CTranslate2": "mlx_t5.benchmarks.peer_programs:CTranslate2",
}
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# How OpenMP threads wait for work; variables that the user has set are kept. Milliseconds per token
# (t5-small's shape, 2 cores of an AMD EPYC) alone / while other programs compute:
#   spin, the default of GNU's OpenMP       CTranslate2 4.1 / 98, torch 14.7 / 138
#   sleep at once (OMP_WAIT_POLICY=passive) CTranslate2 6.8 / 10, torch 14.7 / 26
#   spin for 0.1 ms, then sleep             CTranslate2 4.0 / 14, torch 14.0 / 32
WAITING = {
    "GOMP_SPINCOUNT": "10000",  # GNU's OpenMP: number of spins, about 0.1 ms
    "KMP_BLOCKTIME": "1",  # Intel's and LLVM's OpenMP: milliseconds
    # CTranslate2 takes oneDNN, as on other processors. On 2 cores of an Intel Xeon two threads of
    # its MKL take 5.1 ms per token of the bundled target, one takes 0.8 ms, and oneDNN's two 0.5.
    "CT2_USE_MKL": "0",
}
Decode = Callable[..., Timing]  # accepts the keywords of `Program.timed` except num_draft


def _over(name: str) -> Callable[[dict], str]:
    return lambda row: str(row["over"].get(name, ""))


COLUMNS: printing.Columns = {
    **printing.WAY,
    **printing.SPEED,
    **{f"over {name}": _over(name) for name in OTHERS},
    "seconds": lambda row: f"{median_total(row['seconds']):.2f}",
    "prompts/s": lambda row: f"{sum(map(len, row['tokens'])) / median_total(row['seconds']):.1f}",
    **printing.TEXTS,
}
DECODING: printing.Columns = {
    **printing.WAY,
    "first token, ms": lambda row: f"{1e3 * row['first_token_seconds']:.1f}",
    "then ms/token": lambda row: f"{1e3 * row['decode_seconds_a_token']:.2f}",
    "speed-up of decoding (range)": lambda row: str(row["decode_speed_up"]),
}
NOTES = (
    "regular and draft are this project's. A speed-up is the ratio of tokens per second, encoding "
    "included, to regular or to the variant in the column's title. texts: whether all tokens equal "
    "those of regular. first token: the time for one token per prompt, which is encoding and one "
    "pass. The rest of the time is decoding. start-up: from the start of a process to the first "
    "token of the first prompt, imports and loading included."
)


OPTIONS = {
    **workload.MODELS,
    **workload.prompts(16, workload.MIXED),
    "document": Option(
        "join the prompts, which must be single sentences of one task, to one document",
        False,
        bool,
        group="what is compared",
    ),
    "sampling": Option("no draft; greedy and sampled", False, bool),
    "num_draft": num_draft(
        help="proposals per step of the draft and (numbers only) of assisted generation",
        default=(5, AUTO),
        several=True,
    ),
    "batch_size": Option(
        "prompts decoded together, one table each", (1,), at_least(1), several=True
    ),
    **workload.measuring(3),
}


def run_peers(args: argparse.Namespace, command: str) -> int:
    printing.check_writable(args.json)
    prompts = workload.chosen(args.task, args.prompts, args.count).prompts
    tables: list[dict] = []
    with contextlib.ExitStack() as stack:
        pair = {"model": args.model, "draft_model": args.draft_model, "dtype": args.dtype}
        start_project = partial(start_program, PROJECT, {}, **pair)
        project = stack.enter_context(start_project())
        facts = project.call("describe")
        print(printing.header(facts, command, **workload.header_fields(args)), flush=True)
        others = starters_of_others(project, facts, stack)
        processes = {name: stack.enter_context(starter()) for name, starter in others.items()}
        programs, missing = describe(processes)
        for program in programs.values():
            print(printing.facts_line(program), flush=True)
        ids = project.call("encode", texts=prompts)
        processes = {PROJECT: project} | {name: processes[name] for name in programs}
        starters = {PROJECT: start_project} | {name: others[name] for name in programs}
        start_ups = time_starts(starters, ids[:1], args.repeats)
        print(f"start-up in s: {printing.facts_line(start_ups)}", flush=True)
        variants = all_variants(processes, args.num_draft)
        if args.sampling:
            variants = sampled(variants)
        if args.document:
            variants = of_document(variants, prompts)
        for size in args.batch_size:
            table = peer_table(variants, ids, size, args)
            table["left_out"] = missing | table["left_out"]
            print(f"\n{peer_text(table, facts['dtype'])}", flush=True)
            tables.append(table)
    print(f"\n{NOTES}")
    record = {"command": command, "environment": facts, "programs": programs, "tables": tables}
    record["start_up_seconds"] = start_ups
    printing.write_record(args.json, record)
    rows = [row for table in tables for row in table["rows"]]
    differs = any(row["different"] for row in rows if is_project(row["way"]))
    return int(differs and facts["dtype"] == "float32")


def start_program(name: str, environment: Mapping[str, str], **keywords: Any) -> Process:
    waiting = {variable: os.environ.get(variable, value) for variable, value in WAITING.items()}
    return Process(PROGRAMS[name], {**environment, **waiting}, **keywords)


def starters_of_others(
    project: Process, facts: Mapping[str, Any], stack: contextlib.ExitStack
) -> dict[str, partial[Process]]:
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    target, draft = project.call("folders", scratch=str(scratch))
    common = {"target": target} | {name: facts[name] for name in ("threads", "dtype", "device")}
    more = {"transformers": {"draft": draft}, "CTranslate2": {"scratch": str(scratch / "ct2")}}
    environment = dict.fromkeys(THREADS, str(facts["threads"]))
    return {
        name: partial(start_program, name, environment, **common, **keywords)
        for name, keywords in more.items()
    }


def time_starts(
    starters: Mapping[str, partial[Process]], prompt: Ids, repeats: int
) -> dict[str, float]:
    """Each program's median seconds from the start of a process to its first token."""
    seconds: dict[str, list[float]] = {name: [] for name in starters}
    for _ in range(repeats):
        for name, starter in starters.items():
            began = time.perf_counter()
            with starter() as process:
                process.call("decode", prompts=prompt, num_draft=0, max_tokens=1, batch_size=1)
                seconds[name].append(time.perf_counter() - began)
    return {name: round(statistics.median(each), 2) for name, each in seconds.items()}


def describe(processes: Mapping[str, Process]) -> tuple[dict[str, dict], dict[str, str]]:
    programs, missing = {}, {}
    for name, process in processes.items():
        try:
            programs[name] = process.call("describe")
        except UserError as error:
            missing[name] = str(error)
    return programs, missing


def all_variants(
    processes: Mapping[str, Process], num_draft: Sequence[int | str]
) -> dict[str, Decode]:
    fixed = [n for n in num_draft if n != AUTO]
    numbers: dict[str, dict[str, int | str]] = {
        PROJECT: {REGULAR: 0, **{f"{DRAFT} {n}": n for n in num_draft}},
        "transformers": {GREEDY: 0, ASSISTED: AUTO, **{f"{ASSISTED} {n}": n for n in fixed}},
        "CTranslate2": {CT2: 0},
    }

    def variant(process: Process, n: int | str) -> Decode:
        return lambda **keywords: process.call("timed", num_draft=n, **keywords)

    return {
        name: variant(process, n)
        for program, process in processes.items()
        for name, n in numbers[program].items()
    }


def sampled(variants: Mapping[str, Decode]) -> dict[str, Decode]:
    greedy = {name: variants[name] for name in (REGULAR, GREEDY) if name in variants}
    names = [(name, how) for name in greedy for how in SAMPLING]
    rows = {f"{name.removesuffix(' greedy')} with {how}": (name, how) for name, how in names}
    return greedy | {row: partial(greedy[n], **SAMPLING[how]) for row, (n, how) in rows.items()}


def of_document(variants: Mapping[str, Decode], texts: Sequence[str]) -> dict[str, Decode]:
    def document(decode: Decode) -> Decode:
        return lambda prompts, **keywords: decode(prompts=texts[: len(prompts)], **keywords)

    return {
        REGULAR: lambda **keywords: variants[REGULAR](**keywords | {"batch_size": 1}),
        **{f"document, {name}": document(variants[name]) for name in variants if is_project(name)},
        **{name: variants[name] for name in OTHERS if name in variants},
    }


def is_project(variant: str) -> bool:
    return variant.startswith((REGULAR, f"{DRAFT} ", "document, "))


def peer_table(
    variants: Mapping[str, Decode],
    ids: Sequence[list[int]],
    batch_size: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measures the variants in turn: at each prompt, or with a batch or a document at all."""
    single = batch_size == 1 and not args.document
    turns = workload.cut(ids, 1 if single else len(ids))
    first = single or args.sampling
    keywords = {"max_tokens": args.max_tokens, "batch_size": batch_size, "first": first}
    left_out: dict[str, str] = {}

    def attempt(prompts: Ids, name: str) -> Timing | None:
        if name in left_out:
            return None
        try:
            return variants[name](prompts=prompts, **keywords)
        except UserError as error:
            if is_project(name):
                raise
            left_out[name] = str(error)  # some releases of transformers fail for certain models
            return None

    for name in variants:  # a first try shows which variants fail
        attempt(turns[0][: batch_size if args.document else 2], name)

    def of_turn(name: str) -> Callable[[int], Timing | None]:
        return lambda turn: attempt(turns[turn], name)

    timed = interleave(
        {name: of_turn(name) for name in variants if name not in left_out},
        len(turns),
        args.repeats,
        lambda answer: answer.decided if answer else 0,
        warm_up=not args.document,  # the first try was one batch; one by one would take minutes
    )
    rows = summarize({name: times for name, times in timed.items() if name not in left_out})
    how = {"batch_size": batch_size, "document": args.document, "count": len(ids)}
    return how | {"rows": rows, "left_out": left_out}


def by_its_clock(timed: Timed, figures: Callable[[Timing], tuple[float, int]]) -> Timed:
    result = Timed()
    for answers in timed.outcomes:
        result.add([(*figures(answer), answer.tokens) for answer in answers])
    return result


def summarize(timed: Mapping[str, Timed]) -> list[dict]:
    total, firsts, rests = (
        {name: by_its_clock(times, figures) for name, times in timed.items()}
        for figures in (Timing.whole, Timing.first, Timing.rest)
    )
    regular = total[REGULAR]
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "speed_up": speed_up(regular, times),
            "over": {other: speed_up(total[other], times) for other in OTHERS if other in total},
            "tokens_per_second": 1 / times.seconds_a_token(),
            "different": None if " with " in name else differing(times.outcomes, regular.outcomes),
            "seconds": times.seconds,
            "tokens": times.outcomes[-1],
        }
        for name, times in total.items()
    ]
    answers = [answer for times in timed.values() for row in times.outcomes for answer in row]
    if all(answer.first_seconds is not None for answer in answers) and all(
        sum(repeat) for rest in rests.values() for repeat in rest.tokens
    ):
        for row in rows:
            first, rest = firsts[row["way"]], rests[row["way"]]
            row["first_token_seconds"] = first.seconds_a_token()
            row["decode_seconds_a_token"] = rest.seconds_a_token()
            row["decode_speed_up"] = speed_up(rests[REGULAR], rest)
            row["first_seconds"] = first.seconds
    return sorted(rows, key=lambda row: -row["tokens_per_second"])


def peer_text(table: dict, dtype: str) -> str:
    rows = table["rows"]
    how = f"as one document, {REGULAR} one by one, " if table["document"] else ""
    lines = [f"{table['count']} prompts, {how}batch {table['batch_size']}"]
    lines += ["", printing.markdown(COLUMNS, rows)]
    if "decode_speed_up" in rows[0]:
        lines += ["", printing.markdown(DECODING, rows)]
    different = [row["way"] for row in rows if row["different"]]
    if different and dtype == "float32":
        lines += ["", f"In float32 equal texts are expected; different: {', '.join(different)}."]
    elif different:
        lines += ["", f"In {dtype} the two best tokens may be equal to within rounding."]
    if table["left_out"]:
        lines += ["", *(f"left out: {name} ({why})" for name, why in table["left_out"].items())]
    return "\n".join(lines)
