"""`sweep`: what --num-draft and --delta do to speed and quality, and which to use.

Every setting of the grid decodes greedily. A few prompts are timed one by one, in turns; quality is
judged on more of them, decoded in batches, as a text does not depend on its batch. Writes a CSV
file, a picture and all figures as JSON.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import options, plot, printing, workload
from benchmarks.costs import PairCosts
from benchmarks.extras import needed
from benchmarks.figures import beside_theory, cost_meter, figures, measure
from benchmarks.options import DRAFT, LOOKUP, REGULAR
from benchmarks.quality import points, quality
from benchmarks.recommendation import explain, recommend
from benchmarks.subject import Subject, begin, decoding
from benchmarks.workload import Workload
from mlx_t5.cli.arguments import add_number, add_setting, at_least, between
from mlx_t5.drafting import theory
from mlx_t5.errors import UserError

Setting = tuple[float, int]  # delta, gamma

COLUMNS: printing.Columns = {
    "delta": lambda row: f"{row['delta']:g}",
    "num-draft": lambda row: f"{row['num_draft']}",
    **printing.SPEED,
    **printing.TOKENS_PER_CALL,
    **printing.THEORY,
    "exact match": points("exact_match"),
    "chrF": points("chrf"),
    "exact match, delta 0": points("exact_match_lossless"),
    "chrF, delta 0": points("chrf_lossless"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 6, "mixed")
    options.add_num_draft(parser, [1, 2, 3, 4, 5, 6, 8], "numbers", at_least(1))
    add = parser.add_argument
    add_setting(parser, "--delta", default=[0.0, 0.5, 0.9, 1.0], help="0 is always among them")
    add("--way", choices=(DRAFT, LOOKUP), default=DRAFT, help="what proposes (default: draft)")
    _add_quality(parser)
    options.add_measuring(parser, 3)
    add(
        "--output",
        type=Path,
        default=Path("sweep"),
        metavar="NAME",
        help="write NAME.csv and NAME.png, and NAME.json unless --json says where "
        "(default: %(default)s)",
    )


def _add_quality(parser: argparse.ArgumentParser) -> None:
    add = partial(add_number, parser)
    what = "prompts by which quality is judged"
    add("--quality-count", type=at_least(1), default=60, help=what)
    add("--quality-batch", type=at_least(1), default=20, help="decoded at the same time there")
    what = "points of exact match and of chrF that the recommended setting may lose"
    add("--tolerance", type=between(0, 100), default=1.0, help=what)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures, prints and writes; exit status 1 if delta 0 changes a text in float32."""
    for package in ("sacrebleu", "matplotlib"):
        needed(package)
    picture, sheet = (args.output.with_name(args.output.name + end) for end in (".png", ".csv"))
    figures_file = args.json or args.output.with_name(args.output.name + ".json")
    printing.check_writable(figures_file, picture, sheet)
    prompts = workload.chosen(args.task, args.prompts, args.count)
    judged = workload.chosen(args.task, args.prompts, args.quality_count)
    packages, count = ["sacrebleu", "matplotlib"], len(judged.prompts)
    subject, facts = begin(args, command, packages, judged=count)
    settings = [(d, n) for d in sorted({0.0, *args.delta}) for n in sorted(set(args.num_draft))]
    rows, costs, regular = timings(subject, prompts, settings, args)
    qualities = quality_of(subject, judged, settings, args)
    rows = [row | own for row, own in zip(rows, qualities, strict=True)]
    print(f"\n{printing.markdown(COLUMNS, rows)}\n\n{explain(rows, args.tolerance, count)}")
    best = recommend(rows, args.tolerance)
    plot.draw(rows, best, title(facts, args, count), picture)
    write_csv(sheet, rows)
    best = best and {name: best[name] for name in ("delta", "num_draft")}
    record = {"command": command, "environment": facts, "judged": count, "recommended": best}
    printing.write_record(
        figures_file, {**record, "costs": costs, "regular": regular, "rows": rows}
    )
    print(f"wrote {sheet}, {picture} and {figures_file}")
    changed = any(row["delta"] == 0 and row["different"] for row in rows)
    return int(changed and facts["dtype"] == "float32")


def title(facts: dict, args: argparse.Namespace, judged: int) -> str:
    """What the picture says about where it comes from."""
    run = options.header_fields(args)
    return (
        f"{run['target']} with {run['draft'] if args.way == DRAFT else args.way}: prompts "
        f"{run['prompts']} timed {args.repeats} times, {judged} judged\n"
        f"{facts['machine']}, {facts['cores']} cores, {facts['device']}, mlx {facts['mlx']}, "
        f"{facts['dtype']}"
    )


def timings(
    subject: Subject, prompts: Workload, settings: Sequence[Setting], args: argparse.Namespace
) -> tuple[list[dict], PairCosts, dict]:
    """Times regular decoding, every setting and the passes in turns.

    Returns:
        The figures of each setting, what passes cost, and the times of regular decoding.
    """
    turns, longest = workload.cut(prompts.prompts, 1), {"max_tokens": args.max_tokens}
    ways: dict[Any, Any] = {REGULAR: subject.runs(REGULAR, 0, turns, **longest)}
    for delta, n in settings:
        ways[delta, n] = subject.runs(args.way, n, turns, delta=delta, **longest)
    meter = cost_meter(subject, prompts, args.num_draft)
    timed, costs = measure(ways, len(turns), args.repeats, meter)
    assert costs is not None, "they were measured"
    regular = timed[REGULAR]
    rows = [
        {"delta": delta, "num_draft": n, **figures(timed[delta, n], regular)}
        | beside_theory(timed[delta, n], regular, costs)
        for delta, n in settings
    ]
    own = {name: getattr(regular, name) for name in ("seconds", "tokens")}
    return with_theory(rows, costs), costs, own


def with_theory(rows: Sequence[dict], costs: PairCosts) -> list[dict]:
    """Adds theory's speed-up, from one alpha for all settings of a delta.

    That alpha is the mean of theirs, as theory knows no other influence on it.
    """
    result = []
    for row in rows:
        alphas = [other["alpha"] for other in rows if other["delta"] == row["delta"]]
        alpha, gamma = sum(alphas) / len(alphas), row["num_draft"]
        predicted = theory.speed_up(alpha, gamma, row["c"], costs.v)
        result.append({**row, "theory_alpha": alpha, "predicted": predicted})
    return result


def quality_of(
    subject: Subject, prompts: Workload, settings: Sequence[Setting], args: argparse.Namespace
) -> list[dict]:
    """The quality of every setting's texts."""

    def texts(decoder: Any) -> list[str]:
        turn = decoding(decoder, [prompts.prompts], args.quality_batch, max_tokens=args.max_tokens)
        return [result.text or "" for result in turn(0)]

    lossless = texts(subject.regular())
    return [
        quality(texts(subject.speculative(args.way, n, d)), prompts.references, lossless)
        for d, n in settings
    ]


def write_csv(file: Path, rows: Sequence[dict]) -> None:
    """One line a setting; a speed-up takes three columns.

    Raises:
        UserError: the file cannot be written.
    """
    flat = []
    for row in rows:
        line: dict[str, Any] = {}
        for name, value in row.items():
            if name.endswith("speed_up"):
                line |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            elif not isinstance(value, list):
                line[name] = value
        flat.append(line)
    try:
        with open(file, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
