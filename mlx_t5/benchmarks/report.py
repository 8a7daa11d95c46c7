"""`report`: one row about this machine in under five minutes, to paste into the documentation.

The target's passes are timed over different numbers of positions M. Then held-out prompts are
decoded regularly, speculatively twice, and regularly again. If the machine slows down steadily,
this affects both kinds of decoding alike. The report's drift compares the last regular decoding
with the first. With slow models, fewer prompts are decoded, so that the report takes about the same
time. At the end, on a GPU, the target's passes are timed in bfloat16 and float16, and on a Mac with
its weights in a floating-point (fp) mode, too (weight_types.py).
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_t5 import loading
from mlx_t5.backend import on_cpu
from mlx_t5.backend.device_memory import limit
from mlx_t5.benchmarks import machine, printing, weight_types, workload
from mlx_t5.benchmarks.figures import (
    MEASURED_POSITIONS,
    Decode,
    PairCosts,
    figures,
    pair_costs,
    results_of,
    source_length,
)
from mlx_t5.benchmarks.grow import SHAPES, grow
from mlx_t5.benchmarks.pass_times import NEEDED, TARGET_POINTS
from mlx_t5.benchmarks.subject import Subject, decided, decoding
from mlx_t5.benchmarks.workload import DRAFT, REGULAR
from mlx_t5.cli.arguments import Option, at_least
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError, readable
from mlx_t5.installation import MODELS
from mlx_t5.model import T5
from mlx_t5.timing import Timed, timed_turn

# Shares of the time for measuring. After the opening baseline the prompts are decoded three more
# times, which takes about the same share each.
LADDER_SHARE, OPENING_SHARE, EXACT_SHARE = 0.15, 0.2, 0.05
TYPES_SHARE = 0.05  # for each measurement of other types, on a GPU
MOST_PROMPTS = 32
LEAST_TOKENS, MOST_TOKENS = 4, 64  # limits on the length of a text
EXACT_TOKENS, EXACT_ROWS = 16, 2  # in exact decoding: length of a text, and texts at a time
GROWN = (("target", "t5-large", "demo-large"), ("draft", "t5-small", "demo-small-draft"))
SHOWN = (2, 4, 5, 6, 8, 11, 16)  # the row has v(M) for these M, or "–" if it was not measured


def chip(record: dict[str, Any]) -> str:
    name, gpu = record["hardware"]["chip"], record["hardware"]["gpu"]
    return name if gpu in (None, name) else f"{name}, {gpu}"


def computes_on(record: dict[str, Any]) -> str:
    environment, cores = record["environment"], record["hardware"]["gpu_cores"]
    if environment["device"] == "cpu":
        return f"CPU, {environment['cores']} cores, {environment['blas']}"
    return f"GPU, {cores} cores" if cores else "GPU"


def weights(record: dict[str, Any]) -> str:
    bits, dtype = record["target"]["bits"], record["environment"]["dtype"]
    return f"{' and '.join(map(str, bits))} bits, {dtype}" if bits else dtype


def v_at_shown(record: dict[str, Any]) -> str:
    v = record["v"]
    return " ".join(f"{v[m]:.2f}" if m in v else "–" for m in SHOWN)


COLUMNS: printing.Columns = {
    "date": lambda record: record["date"],
    "chip": chip,
    "computes on": computes_on,
    "memory": lambda record: readable(record["hardware"]["memory_bytes"]),
    "system": lambda record: record["hardware"]["system"],
    "mlx": lambda record: record["environment"]["mlx"],
    "target, draft": lambda record: f"{record['target']['name']}, {record['draft']['name']}",
    "weights": weights,
    f"v at {' '.join(map(str, SHOWN))}": v_at_shown,
    "c": lambda record: f"{record['c']:.3f}",
    "α": lambda record: f"{record['alpha']:.3f}",
    "γ (best by v)": lambda record: f"{record['num_draft']} ({record['best_num_draft']})",
    "tokens/call": lambda record: f"{record['tokens_per_call']:.2f}",
    "regular tokens/s": lambda record: f"{record['regular_tokens_per_second']:.1f}",
    "speed-up (range)": lambda record: str(record["speed_up"]),
    "drift": lambda record: f"{record['drift']:+.0%}",
    "prompts": lambda record: f"{record['prompts']}",
    "texts": lambda record: printing.texts(record["different"]),
    "peak memory": lambda record: readable(record["peak_memory_bytes"]),
    "exact decoding": lambda record: "holds" if record["exact"]["holds"] else "no",
    "float16": lambda record: weight_types.float16_text(record["float16"]),
    "fp mode": lambda record: weight_types.fp_mode_text(record["fp_mode"]),
}


OPTIONS = {
    "model": workload.MODEL.but(
        default=None,
        help="the target (default: t5-11b with t5-small if models/ has both, else the bundled "
        "pair, grown to the shapes of t5-large and t5-small, in bfloat16 on a GPU)",
    ),
    "draft_model": workload.DRAFT_MODEL.but(default=None, help="the draft (default: see --model)"),
    "dtype": workload.MODELS["dtype"],
    "prompts": workload.PROMPTS.but(group="measuring"),
    "num_draft": Option("tokens proposed per step", 4, at_least(1), group="measuring"),
    "seconds": Option(
        "time for measuring, without loading models and without making the grown pair",
        180,
        at_least(1),
    ),
    "json": workload.JSON.but(default=Path("report.json")),
}


def run_report(args: argparse.Namespace, command: str) -> int:
    printing.check_writable(args.json)
    prompts = workload.chosen(workload.MIXED, args.prompts, MOST_PROMPTS).prompts
    num_draft = args.num_draft
    target, draft, dtype = chosen_pair(args)
    log_progress(f"loading {target} and {draft}")
    subject = Subject.load(target, draft, dtype)
    record: dict[str, Any] = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "environment": machine.environment(machine.dtype_of(subject.target)),
        "hardware": machine.hardware(),
        "target": shape(subject.target, target),
        "draft": shape(subject.require_draft(), draft),
        "num_draft": num_draft,
        **measured(subject, prompts, num_draft, args.seconds),
    }
    record["exact"] = exactness(subject, num_draft, prompts, EXACT_SHARE * args.seconds)
    log_progress("other types of weights")  # last, because they change the target
    how = subject.target, source_length(subject, prompts), TYPES_SHARE * args.seconds
    record["float16"] = weight_types.float16(*how)
    record["fp_mode"] = weight_types.fp_mode(*how)
    print(f"{printing.header(record['environment'], command)}\n")
    print(printing.markdown(COLUMNS, [record]))
    printing.write_record(args.json, record)
    peak, there = record["peak_memory_bytes"], limit()
    ending = "it fits" if peak <= there else "it does not fit, and is slow"
    print(f"\nThe pair took {readable(peak)} at most, of {readable(there)}: {ending}.")
    if record["float16"]:
        print(weight_types.faster_dtype(record["float16"]))
    print(f"The line above is for docs/performance.md; {args.json} has all figures.")
    return int(bool(record["different"]) and record["environment"]["dtype"] == "float32")


def log_progress(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def chosen_pair(args: argparse.Namespace) -> tuple[str, str, str | None]:
    """The models to measure; without converted ones, an enlarged copy of the bundled pair."""
    pair = loading.choose_pair(args.model, args.draft_model)
    if pair.copy or pair.draft is None:
        raise UserError("a report needs a draft model: name one with --draft-model")
    if args.model or args.draft_model or pair.target.parent != BUNDLED:
        return str(pair.target), str(pair.draft), args.dtype
    dtype = args.dtype or ("float32" if on_cpu() else "bfloat16")
    for model, shape_name, name in GROWN:
        if not (MODELS / name).is_dir():
            log_progress(
                f"growing the bundled {model} to the shape of {shape_name}; later reports reuse it"
            )
            grow(BUNDLED / model, MODELS / name, SHAPES[shape_name], dtype)
    target, draft = (str(MODELS / name) for _, _, name in GROWN)
    return target, draft, dtype


def shape(model: T5, name: str) -> dict[str, Any]:
    bits = {layer.bits for _, layer in model.named_modules() if hasattr(layer, "bits")}
    sizes = ("d_model", "d_ff", "num_heads", "d_kv", "num_layers", "num_decoder_layers")
    facts = {"name": Path(name).name, "bits": sorted(bits)}
    return facts | {size: getattr(model.config, size) for size in sizes}


def measured(
    subject: Subject, prompts: Sequence[str], num_draft: int, seconds: float
) -> dict[str, Any]:
    log_progress("timing passes over 1 to 64 positions")
    steps = range(1, num_draft + 2)  # positions of the steps that are timed below
    points = list(dict.fromkeys([*steps, *TARGET_POINTS]))
    needed = max(NEEDED, len(steps))
    costs = pair_costs(subject, prompts, points, LADDER_SHARE * seconds, needed)
    passes = costs.seconds
    share = OPENING_SHARE * seconds
    longest = min(max(int(share / passes[1]), LEAST_TOKENS), MOST_TOKENS)
    turns = workload.cut(prompts, 1)
    timed = in_turns(
        decoding(subject.decoder(REGULAR), turns, 1, max_tokens=longest),
        decoding(subject.decoder(DRAFT, num_draft), turns, 1, max_tokens=longest),
        affordable(share, len(turns)),
    )
    facts = {"passes": passes, "c": costs.c, "v": costs.v, "max_tokens": longest}
    return facts | gains(timed[REGULAR], timed[DRAFT], costs)


def gains(regular: Timed, speculative: Timed, costs: PairCosts) -> dict[str, Any]:
    row = figures(speculative, regular)
    numbers = [m - 1 for m in costs.v if m <= MEASURED_POSITIONS]
    gain = {n: costs.speed_up(row["alpha"], n) for n in numbers}
    opening, closing = regular.repeats_a_token()
    return row | {
        "best_num_draft": max(gain, key=gain.__getitem__),
        "prompts": len(speculative.seconds[0]),
        "regular_tokens_per_second": 1 / regular.seconds_a_token(),
        "drift": closing / opening - 1,
        "peak_memory_bytes": max(r.stats.peak_memory_bytes for r in results_of(speculative)),
    }


def affordable(seconds: float, most: int) -> Iterator[int]:
    began = time.perf_counter()
    for turn in range(most):
        if turn and time.perf_counter() - began > seconds:
            return
        yield turn


def in_turns(regular: Decode, speculative: Decode, turns: Iterable[int]) -> dict[str, Timed]:
    """Times regular, speculative, speculative and regular decoding of the same turns."""
    timed = {REGULAR: Timed(), DRAFT: Timed()}
    for decode in (regular, speculative):
        decode(0)  # kernels of these shapes may have to be compiled
    for name, decode, what in (
        (REGULAR, regular, "regular decoding, opening baseline"),
        (DRAFT, speculative, "speculative decoding"),
        (DRAFT, speculative, "speculative decoding, again"),
        (REGULAR, regular, "regular decoding, closing baseline"),
    ):
        log_progress(what)
        repeat = [timed_turn(decode, turn, decided, time.perf_counter) for turn in turns]
        turns = range(len(repeat))
        timed[name].add(repeat)
    return timed


def exactness(
    subject: Subject, num_draft: int, prompts: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Checks that `exact=True` gives equal tokens without a draft, with a draft and in batches."""
    log_progress("exact decoding")

    def tokens(decoder: SpeculativeDecoder, texts: Sequence[str]) -> list[list[int]]:
        request = decoder.request(max_tokens=EXACT_TOKENS, reuse=False)
        results = decoder.results(texts, request, EXACT_ROWS)
        return [result.tokens for result in results]

    regular: list[list[int]] = []
    reason = ""
    try:
        target_only, drafted = (
            subject.decoder(proposer, num_draft, exact=True) for proposer in (REGULAR, DRAFT)
        )
        speculative = []
        for turn in affordable(seconds, len(prompts)):
            regular += tokens(target_only, [prompts[turn]])
            speculative += tokens(drafted, [prompts[turn]])
        together = tokens(drafted, prompts[: len(regular)])
        rows = zip(regular, speculative, together, strict=True)
        if different := sum(1 for a, b, c in rows if not a == b == c):
            reason = f"{different} of {len(regular)} texts differ"
    except UserError as error:  # exact decoding is not possible on this device
        reason = str(error)
    counts = {"prompts": len(regular), "tokens": sum(map(len, regular))}
    return {"holds": not reason, "reason": reason, **counts}
