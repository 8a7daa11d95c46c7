"""`sweep`: measures the effect of --num-draft and --delta on speed and quality; recommends values.

Every setting of the grid decodes greedily. For speed, a few prompts are decoded one by one, and the
settings take turns. For quality, more prompts are decoded, in batches, which is faster and does not
change the texts. Quality is exact match and chrF, from 0 to 100. chrF
(https://aclanthology.org/W15-3049) compares n-grams of characters, so unlike exact match it
distinguishes a wrong letter from a wrong sentence. A picture shows speed against the number of
proposals, and quality against delta. A JSON file has all figures.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.benchmarks import pictures, printing, workload
from mlx_t5.benchmarks.figures import figures
from mlx_t5.benchmarks.subject import Subject, begin, decided, decoding
from mlx_t5.benchmarks.workload import DRAFT, REGULAR, Workload
from mlx_t5.cli.arguments import Option, at_least, between, num_draft, setting
from mlx_t5.drafting.named import DRAFTERS
from mlx_t5.settings import AUTO, NONE
from mlx_t5.timing import interleave
from mlx_t5.training.evaluation import NEAR, NOT_FASTER, chrf, is_reliable

if TYPE_CHECKING:
    from mlx_t5.decoder import SpeculativeDecoder

Setting = tuple[float, int | str]  # delta, number of proposals


def points(name: str) -> Callable[[dict], str]:
    return lambda row: "" if row[name] is None else f"{row[name]:.1f}"


COLUMNS: printing.Columns = {
    "delta": lambda row: f"{row['delta']:g}",
    "num-draft": lambda row: f"{row['num_draft']}",
    **printing.SPEED,
    **printing.TOKENS_PER_CALL,
    "exact match": points("exact_match"),
    "chrF": points("chrf"),
    "exact match, delta 0": points("exact_match_lossless"),
    "chrF, delta 0": points("chrf_lossless"),
}


OPTIONS = {
    **workload.MODELS,
    **workload.prompts(6, workload.MIXED),
    "num_draft": num_draft(
        help="numbers of proposals per step, or auto",
        default=(1, 2, 3, 4, 5, 6, 8, AUTO),
        several=True,
        group="the grid",
    ),
    "delta": setting(
        "delta",
        help="values of delta; 0 is always added",
        default=(0.0, 0.5, 0.9, 1.0),
        several=True,
    ),
    "way": Option("the proposer", DRAFT, (DRAFT, *DRAFTERS)),
    "quality_count": Option("number of prompts for measuring quality", 60, at_least(1)),
    "quality_batch": Option("prompts decoded together while measuring quality", 20, at_least(1)),
    "tolerance": Option(
        "points of exact match and of chrF that the recommended setting may lose",
        1.0,
        between(0, 100),
    ),
    **workload.measuring(3),
    "output": Option(
        "write NAME.png, and NAME.json unless --json names a different file",
        Path("sweep"),
        Path,
        metavar="NAME",
        group="measuring",
    ),
}


def run_sweep(args: argparse.Namespace, command: str) -> int:
    importlib.import_module("matplotlib")  # if it is missing, fails before the work
    picture, record_file = (args.output.with_name(args.output.name + e) for e in (".png", ".json"))
    figures_file = args.json or record_file
    printing.check_writable(figures_file, picture)
    prompts = workload.chosen(args.task, args.prompts, args.count)
    quality_prompts = workload.chosen(args.task, args.prompts, args.quality_count)
    count = len(quality_prompts.prompts)
    if args.way in DRAFTERS:
        args.draft_model = NONE
    subject, facts = begin(args, command, judged=count)
    numbers = sorted(set(args.num_draft), key=_proposals)
    settings = [(d, n) for d in sorted({0.0, *args.delta}) for n in numbers]
    rows, regular = timings(subject, prompts, settings, args)
    how = args.way, args.quality_batch, args.max_tokens
    qualities = quality_of(subject, quality_prompts, settings, *how)
    rows = [row | scores for row, scores in zip(rows, qualities, strict=True)]
    # Without references, two columns are empty.
    columns = {name: cell for name, cell in COLUMNS.items() if any(map(cell, rows))}
    print(f"\n{printing.markdown(columns, rows)}\n\n{explain(rows, args.tolerance, count)}")
    best = recommend(rows, args.tolerance)
    pictures.draw_deltas(rows, best, f"{printing.facts_line(facts)}\n{command}", picture)
    best = best and {name: best[name] for name in ("delta", "num_draft")}
    record = {"command": command, "environment": facts, "judged": count, "recommended": best}
    printing.write_record(figures_file, {**record, "regular": regular, "rows": rows})
    print(f"wrote {picture} and {figures_file}")
    changed = any(row["delta"] == 0 and row["different"] for row in rows)
    return int(changed and facts["dtype"] == "float32")


def timings(
    subject: Subject, prompts: Workload, settings: Sequence[Setting], args: argparse.Namespace
) -> tuple[list[dict], dict]:
    turns = workload.cut(prompts.prompts, 1)
    decoders: dict[Any, Any] = {REGULAR: subject.decoder(REGULAR)}
    decoders |= {(delta, n): subject.decoder(args.way, n, delta) for delta, n in settings}
    variants = {
        key: decoding(decoder, turns, 1, max_tokens=args.max_tokens)
        for key, decoder in decoders.items()
    }
    timed = interleave(variants, len(turns), args.repeats, decided)
    regular = timed[REGULAR]
    rows = [
        {"delta": delta, "num_draft": n, **figures(timed[delta, n], regular)}
        for delta, n in settings
    ]
    return rows, {"seconds": regular.seconds, "tokens": regular.tokens}


def quality_of(
    subject: Subject,
    prompts: Workload,
    settings: Sequence[Setting],
    way: str,
    batch_size: int,
    max_tokens: int,
) -> list[dict]:
    def texts(decoder: SpeculativeDecoder) -> list[str]:
        turn = decoding(decoder, [prompts.prompts], batch_size, max_tokens=max_tokens)
        return [result.text or "" for result in turn(0)]

    references = {"": prompts.references, "_lossless": texts(subject.decoder(REGULAR))}
    scores = {"exact_match": exact_match, "chrf": chrf}
    written = (texts(subject.decoder(way, n, delta)) for delta, n in settings)
    return [
        {
            f"{name}{against}": None if expected is None else score(output, expected)
            for against, expected in references.items()
            for name, score in scores.items()
        }
        for output in written
    ]


def exact_match(texts: Sequence[str], references: Sequence[str]) -> float:
    return 100 * sum(map(str.__eq__, texts, references)) / len(texts)


def recommend(rows: Sequence[dict], tolerance: float) -> dict | None:
    """The fastest setting that loses at most `tolerance` points of quality.

    None if none is reliably faster than regular decoding, judged as distill.py judges. Noise must
    not select a greater delta either. So a greater delta must be better by more than `NEAR` in two
    ways. It must yield more tokens per pass of the target with the same number of proposals.
    Even the slowest repeat of its best setting must be faster than the smaller delta's best one.
    """
    names = measures(rows)
    lossless = next(row for row in rows if row["delta"] == 0)
    allowed = [
        row
        for row in rows
        if all(row[name] >= lossless[name] - tolerance for name in names)
        and is_reliable(row["speed_up"], row["tokens_per_call"])
    ]
    best = None
    for delta in sorted({row["delta"] for row in allowed}):
        other = _fastest([row for row in allowed if row["delta"] == delta])
        if best is None:
            best = other
            continue
        same = best["delta"], other["num_draft"]
        before = next(row for row in rows if (row["delta"], row["num_draft"]) == same)
        more = other["tokens_per_call"] > (1 + NEAR) * before["tokens_per_call"]
        if more and other["speed_up"].low > (1 + NEAR) * best["speed_up"].value:
            best = other
    return best


def _fastest(rows: Sequence[dict]) -> dict:
    fastest = max(row["speed_up"].value for row in rows)
    near = [row for row in rows if row["speed_up"].value >= (1 - NEAR) * fastest]
    return min(near, key=lambda row: _proposals(row["num_draft"]))


def _proposals(num_draft: int | str) -> int:
    """For sorting: auto, which needs no option, comes first."""
    return num_draft if isinstance(num_draft, int) else 0


def measures(rows: Sequence[dict]) -> tuple[str, str]:
    known = all(row["chrf"] is not None for row in rows)
    return ("exact_match", "chrf") if known else ("exact_match_lossless", "chrf_lossless")


def explain(rows: Sequence[dict], tolerance: float, count: int) -> str:
    against = "the references" if measures(rows)[1] == "chrf" else "delta 0's texts"
    best = recommend(rows, tolerance)
    exact = recommend([row for row in rows if row["delta"] == 0], tolerance)
    return (
        f"lossless: {_setting(exact)}\n"
        f"recommended: {_setting(best)}\n"
        f"Recommended is the fastest setting whose exact match and chrF against {against} are at "
        f"most {tolerance:g} points below those of delta 0, on {count} prompts, and whose slowest "
        f"repeat is faster than regular decoding. Among settings within {NEAR:.0%} of the fastest, "
        "auto is preferred, then the fewest proposals. A greater delta is "
        f"recommended only if, with the same number of proposals, a target call yields "
        f"{NEAR:.0%} more tokens, and even the slowest repeat with the greater delta is "
        f"{NEAR:.0%} faster than the best setting with a smaller delta."
    )


def _setting(row: dict | None) -> str:
    if row is None:
        return NOT_FASTER.format("--regular-decode: no setting of this grid")
    delta = f"--delta {row['delta']:g} " if row["delta"] else ""
    return f"{delta}--num-draft {row['num_draft']}, {row['speed_up']} times as fast"
