"""`sweep`: what --num-draft and --delta do to speed and quality, and which to use.

Every setting of the grid decodes greedily. A few prompts are timed one by one, in turns; quality is
judged on more of them, decoded in batches, as a text does not depend on its batch. Writes a CSV
file, a picture and all figures as JSON.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend import UserError
from benchmarks import options, plot, report, theory, workload
from benchmarks.costs import Costs
from benchmarks.extras import needed
from benchmarks.quality import points, quality
from benchmarks.recommendation import explain, recommend
from benchmarks.speed import COSTS, cost_meter, prediction, run_turns, times
from benchmarks.subject import DRAFT, LOOKUP, REGULAR, Subject, begin, decoding
from benchmarks.timing import Timed
from benchmarks.workload import Workload

Setting = tuple[float, int]  # delta, gamma
KEPT = ("tokens_per_call", "alpha", "c", "v", "speed_up", "decode_speed_up", "tokens_per_second")
TIMES = ("seconds", "encode_seconds", "decode_seconds", "tokens", "different")


COLUMNS: report.Columns = {
    "delta": lambda row: f"{row['delta']:g}",
    "num-draft": lambda row: f"{row['num_draft']}",
    "alpha": lambda row: f"{row['alpha']:.3f}",
    "tokens/call": lambda row: f"{row['tokens_per_call']:.2f}",
    "theory": lambda row: f"{row['predicted']:.2f}",
    "decoding measured": lambda row: str(row["decode_speed_up"]),
    "speed-up": lambda row: str(row["speed_up"]),
    "exact match": points("exact_match"),
    "chrF": points("chrf"),
    "exact match, delta 0": points("exact_match_lossless"),
    "chrF, delta 0": points("chrf_lossless"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 6, "mixed")
    options.add_num_draft(parser, [1, 2, 3, 4, 5, 6, 8], "numbers", options.at_least(1))
    add = parser.add_argument
    add(
        "--delta",
        type=options.between(0, 1),
        nargs="+",
        default=[0.0, 0.5, 0.9, 1.0],
        metavar="D",
        help="0 is always among them (default: 0 0.5 0.9 1)",
    )
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
    add = parser.add_argument
    add(
        "--quality-count",
        type=options.at_least(1),
        default=60,
        metavar="N",
        help="prompts by which quality is judged (default: %(default)s)",
    )
    add(
        "--quality-batch",
        type=options.at_least(1),
        default=20,
        metavar="B",
        help="decoded at the same time there (default: %(default)s)",
    )
    add(
        "--tolerance",
        type=options.between(0, 100),
        default=1.0,
        metavar="POINTS",
        help="loss of exact match and of chrF that the recommended setting may have "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace, command: str) -> int:
    """Measures, prints and writes; exit status 1 if delta 0 changes a text in float32."""
    for package in ("sacrebleu", "matplotlib"):
        needed(package)
    picture, sheet = (args.output.with_name(args.output.name + end) for end in (".png", ".csv"))
    figures = args.json or args.output.with_name(args.output.name + ".json")
    report.check_writable(figures, picture, sheet)
    prompts = workload.chosen(args.task, args.prompts, args.count, args.seed)
    judged = workload.chosen(args.task, args.prompts, args.quality_count, args.seed)
    counts = {"timed": f"{len(prompts.prompts)} {prompts.name}", "judged": len(judged.prompts)}
    packages = ["sacrebleu", "matplotlib"]
    subject, facts = begin(args, command, packages, **counts, repeats=args.repeats)
    settings = [(d, n) for d in sorted({0.0, *args.delta}) for n in sorted(set(args.num_draft))]
    timed = measure(subject, prompts, settings, args)
    costs = Costs.of([each for row in timed.pop(COSTS).outcomes for each in row])
    rows = with_theory([row_of(setting, timed, costs) for setting in settings], costs)
    qualities = judge(subject, judged, settings, args)
    rows = [row | own for row, own in zip(rows, qualities, strict=True)]
    advice = explain(rows, args.tolerance, counts["judged"])
    print(f"\n{report.markdown(COLUMNS, rows)}\n\n{advice}")
    best = recommend(rows, args.tolerance)
    plot.draw(rows, best, title(facts, args, counts), picture)
    write_csv(sheet, rows)
    record = {"command": command, "environment": facts, **counts, "costs": costs, "rows": rows}
    regular = {name: getattr(timed[REGULAR], name) for name in ("seconds", "tokens")}
    best = best and {name: best[name] for name in ("delta", "num_draft")}
    report.write_json(figures, {**record, "regular": regular, "recommended": best})
    print(f"wrote {sheet}, {picture} and {figures}")
    changed = any(row["delta"] == 0 and row["different"] for row in rows)
    return int(changed and facts["dtype"] == "float32")


def title(facts: dict, args: argparse.Namespace, counts: dict) -> str:
    """What the picture says about where it comes from."""
    pair = options.of_pair(args)
    return (
        f"{pair['target']} with {pair['draft'] if args.way == DRAFT else args.way}: "
        f"{counts['timed']} prompts timed {args.repeats} times, {counts['judged']} judged\n"
        f"{facts['machine']}, {facts['cores']} cores, {facts['device']}, mlx {facts['mlx']}, "
        f"{facts['dtype']}"
    )


def measure(
    subject: Subject, prompts: Workload, settings: Sequence[Setting], args: argparse.Namespace
) -> dict[Any, Timed]:
    """Lets regular decoding, every setting and the measuring of costs take turns."""
    decoders: dict[Any, tuple] = {REGULAR: subject.counted(None)}
    for delta, gamma in settings:
        decoders[delta, gamma] = subject.counted(args.way, gamma, delta)
    return run_turns(decoders, prompts, cost_meter(subject, prompts, args.num_draft), args)


def row_of(setting: Setting, timed: dict[Any, Timed], costs: Costs) -> dict:
    """What one setting took and what was kept of its proposals."""
    delta, gamma = setting
    measured = times(timed[setting], timed[REGULAR])
    counted = prediction(timed[setting], costs, str(gamma))
    figures = measured | counted
    return {"delta": delta, "num_draft": gamma} | {name: figures[name] for name in KEPT + TIMES}


def with_theory(rows: Sequence[dict], costs: Costs) -> list[dict]:
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


def judge(
    subject: Subject, prompts: Workload, settings: Sequence[Setting], args: argparse.Namespace
) -> list[dict]:
    """The quality of every setting's texts."""

    def texts(decoder: Any) -> list[str]:
        turn = decoding(decoder, [prompts.prompts], args.quality_batch, max_tokens=args.max_tokens)
        return [result.text for result in turn(0)]

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
