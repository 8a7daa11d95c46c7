"""`sweep`: what --num-draft and --delta do to speed and quality, and which to use.

Every setting of the grid decodes greedily. A few prompts are timed one by one, interleaved; quality
is exact match and chrF, in points of 100, on more of them, decoded in batches, as a text does not
depend on its batch. chrF (https://aclanthology.org/W15-3049) compares runs of characters, so it
tells a wrong letter from a wrong sentence, which exact match does not. Writes a picture (speed by
number of proposals, quality by delta) and all figures as JSON.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import pictures, printing, workload
from benchmarks.figures import figures
from benchmarks.subject import Subject, begin, decided, decoding
from benchmarks.workload import DRAFT, LOOKUP, REGULAR, Workload
from mlx_t5.cli.arguments import add_number, add_setting, at_least, between
from mlx_t5.timing import interleave
from mlx_t5.training.texts import chrf

if TYPE_CHECKING:
    from decoder import SpeculativeDecoder

Setting = tuple[float, int]  # delta, gamma
NEAR = 0.02  # settings whose speeds differ by less are taken for equally fast


def points(name: str) -> Callable[[dict], str]:
    """How a table writes one of these figures, which may be unknown."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    workload.add_models(parser)
    workload.add_prompts(parser, 6, "mixed")
    workload.add_num_draft(parser, [1, 2, 3, 4, 5, 6, 8], "numbers", at_least(1))
    add = parser.add_argument
    add_setting(parser, "--delta", default=[0.0, 0.5, 0.9, 1.0], help="0 is always among them")
    add("--way", choices=(DRAFT, LOOKUP), default=DRAFT, help="what proposes (default: draft)")
    number = partial(add_number, parser)
    what = "prompts by which quality is measured"
    number("--quality-count", type=at_least(1), default=60, help=what)
    number("--quality-batch", type=at_least(1), default=20, help="decoded at the same time there")
    what = "points of exact match and of chrF that the recommended setting may lose"
    number("--tolerance", type=between(0, 100), default=1.0, help=what)
    workload.add_measuring(parser, 3)
    what = "write NAME.png, and NAME.json unless --json says where"
    add(
        "--output",
        type=Path,
        default=Path("sweep"),
        metavar="NAME",
        help=f"{what} (default: sweep)",
    )


def run(args: argparse.Namespace, command: str) -> int:
    """Measures, prints and writes; exit status 1 if delta 0 changes a text in float32."""
    importlib.import_module("matplotlib")  # what is missing is said before the work
    picture, record_file = (args.output.with_name(args.output.name + e) for e in (".png", ".json"))
    figures_file = args.json or record_file
    printing.check_writable(figures_file, picture)
    prompts = workload.chosen(args.task, args.prompts, args.count)
    quality_prompts = workload.chosen(args.task, args.prompts, args.quality_count)
    count = len(quality_prompts.prompts)
    subject, facts = begin(args, command, judged=count)
    settings = [(d, n) for d in sorted({0.0, *args.delta}) for n in sorted(set(args.num_draft))]
    rows, regular = timings(subject, prompts, settings, args)
    qualities = quality_of(subject, quality_prompts, settings, args)
    rows = [row | scores for row, scores in zip(rows, qualities, strict=True)]
    print(f"\n{printing.markdown(COLUMNS, rows)}\n\n{explain(rows, args.tolerance, count)}")
    best = recommend(rows, args.tolerance)
    pictures.draw_deltas(rows, best, f"{printing.listed(facts)}\n{command}", picture)
    best = best and {name: best[name] for name in ("delta", "num_draft")}
    record = {"command": command, "environment": facts, "judged": count, "recommended": best}
    printing.write_record(figures_file, {**record, "regular": regular, "rows": rows})
    print(f"wrote {picture} and {figures_file}")
    changed = any(row["delta"] == 0 and row["different"] for row in rows)
    return int(changed and facts["dtype"] == "float32")


def timings(
    subject: Subject, prompts: Workload, settings: Sequence[Setting], args: argparse.Namespace
) -> tuple[list[dict], dict]:
    """The figures of each setting and the times of regular decoding, interleaved."""
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
    subject: Subject, prompts: Workload, settings: Sequence[Setting], args: argparse.Namespace
) -> list[dict]:
    """The quality of every setting's texts."""

    def texts(decoder: SpeculativeDecoder) -> list[str]:
        turn = decoding(decoder, [prompts.prompts], args.quality_batch, max_tokens=args.max_tokens)
        return [result.text or "" for result in turn(0)]

    lossless = texts(subject.decoder(REGULAR))
    written = (texts(subject.decoder(args.way, n, delta)) for delta, n in settings)
    return [quality(lenient, prompts.references, lossless) for lenient in written]


def exact_match(texts: Sequence[str], right: Sequence[str]) -> float:
    """The share of texts that are exactly right, in percent."""
    return 100 * sum(a == b for a, b in zip(texts, right, strict=True)) / len(texts)


def quality(
    texts: Sequence[str], references: Sequence[str] | None, lossless: Sequence[str]
) -> dict[str, float | None]:
    """Both figures, against the right answers where they are known and against delta = 0."""
    return {
        "exact_match": None if references is None else exact_match(texts, references),
        "chrf": None if references is None else chrf(texts, references),
        "exact_match_lossless": exact_match(texts, lossless),
        "chrf_lossless": chrf(texts, lossless),
    }


def recommend(rows: Sequence[dict], tolerance: float) -> dict | None:
    """The fastest setting that loses at most so much quality.

    Noise must not argue for relaxation, so from one delta to a greater one it takes a reason, that
    passes of the target yield more tokens with as many proposals, and a gain that is seen in every
    repeat: even the slowest of the greater delta beats the smaller delta's figure.

    Args:
        rows: of the whole grid, delta 0 included; what `quality` returns, "speed_up" and
            "tokens_per_call" in each.
        tolerance: points of exact match, and of chrF, that may be lost against delta 0. They are
            those against the references, or against delta 0 itself if there are none.

    Returns:
        A row; None if none is faster than regular decoding.
    """
    names = measures(rows)
    lossless = next(row for row in rows if row["delta"] == 0)
    allowed = [
        row for row in rows if all(row[name] >= lossless[name] - tolerance for name in names)
    ]
    best = _fastest([row for row in allowed if row["delta"] == 0])
    for delta in sorted({row["delta"] for row in allowed} - {0}):
        other = _fastest([row for row in allowed if row["delta"] == delta])
        before = _at(rows, best["delta"], other["num_draft"])
        more = other["tokens_per_call"] > (1 + NEAR) * before["tokens_per_call"]
        if more and other["speed_up"].low > (1 + NEAR) * best["speed_up"].value:
            best = other
    return best if best["speed_up"].value > 1 else None


def _at(rows: Sequence[dict], delta: float, num_draft: int) -> dict:
    return next(row for row in rows if (row["delta"], row["num_draft"]) == (delta, num_draft))


def _fastest(rows: Sequence[dict]) -> dict:
    """Of those about as fast as the fastest, the one with the fewest proposals."""
    fastest = max(row["speed_up"].value for row in rows)
    near = [row for row in rows if row["speed_up"].value >= (1 - NEAR) * fastest]
    return min(near, key=lambda row: row["num_draft"])


def measures(rows: Sequence[dict]) -> tuple[str, str]:
    """Names of the two figures that judge, against the references where these are known."""
    known = all(row["chrf"] is not None for row in rows)
    return ("exact_match", "chrf") if known else ("exact_match_lossless", "chrf_lossless")


def explain(rows: Sequence[dict], tolerance: float, count: int) -> str:
    """The lines that tell the user what to use, and how that was chosen.

    Args:
        rows: as for `recommend`.
        tolerance: as for `recommend`.
        count: prompts by which quality was judged.
    """
    against = "the references" if measures(rows)[1] == "chrf" else "delta 0's texts"
    best = recommend(rows, tolerance)
    exact = recommend([row for row in rows if row["delta"] == 0], tolerance)
    return (
        f"lossless: {_setting(exact)}\n"
        f"recommended: {_setting(best)}\n"
        f"Recommended is the fastest setting whose exact match and chrF against {against} are at "
        f"most {tolerance:g} points below those of delta 0, on {count} prompts. Of settings within "
        f"{NEAR:.0%} of each other the one with fewer proposals is taken, and a greater delta only "
        f"where a target call yields {NEAR:.0%} more tokens with as many proposals and even the "
        f"slowest repeat is {NEAR:.0%} faster than what the smaller delta reached."
    )


def _setting(row: dict | None) -> str:
    if row is None:
        return "--regular-decode; no setting of this grid is faster"
    delta = f"--delta {row['delta']:g} " if row["delta"] else ""
    return f"{delta}--num-draft {row['num_draft']}, {row['speed_up']} times regular decoding"
