"""Measures ways of proposing tokens side by side, on held-out prompts of the bundled pair.

    python benchmark.py --task fix --count 40 --repeats 3

All ways run on the same prompts in one process, interleaved, after a warm-up; each row is compared
with regular decoding in the same run, repeat by repeat, and the median of those ratios is printed
with the extremes. Greedy outputs are compared token by token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from backend import mx
from console import Parser
from decoder import SpeculativeDecoder
from demo import corpus
from draft_length import AUTO
from drafters import DraftModel
from model import load
from results import Result
from source_copy import CopyOrDraft, SourceCopy

DEMO = Path(__file__).parent / "demo"
TASKS = {"translate": 1.0, "fix": 0.0}  # share of translations in the stream of examples
REGULAR = "regular"


@dataclass
class Measurement:
    """One way of decoding, over all prompts.

    Attributes:
        name: the way.
        decided: tokens of all outputs, EOS included.
        target_calls: passes of the target's decoder, summed over rows.
        drafted: proposals.
        accepted: those that were kept.
        same: whether every output equals regular decoding's.
        seconds: wall clock of each repeat, encoding included.
    """

    name: str
    decided: float
    target_calls: int
    drafted: int
    accepted: int
    same: bool
    seconds: list[float]


def ways(args: argparse.Namespace) -> dict[str, SpeculativeDecoder]:
    """The decoders to compare, by name; regular decoding is the first."""
    target, tokenizer = load(args.model, args.dtype)
    draft, _ = load(args.draft_model, args.dtype)
    model, copy = DraftModel(draft, target), SourceCopy.of(tokenizer)
    drafters = {"draft": model, "lookup": copy, "draft+lookup": CopyOrDraft(copy, model)}
    return {REGULAR: SpeculativeDecoder(target, None, tokenizer)} | {
        f"{kind} {gamma}": SpeculativeDecoder(target, drafter, tokenizer, num_draft=gamma)
        for kind, drafter in drafters.items()
        for gamma in args.num_draft
    }


def measure(
    decoders: dict[str, SpeculativeDecoder], prompts: list[str], options: dict, repeats: int
) -> list[Measurement]:
    """Runs every decoder on the prompts `repeats` times, taking turns, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    outputs: dict[str, list[Result]] = {}
    for turn in range(-1, repeats):
        for name, decoder in decoders.items():
            began = time.perf_counter()
            outputs[name] = decoder.generate(prompts, **options)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    return [summarise(name, outputs[name], outputs[REGULAR], seconds[name]) for name in decoders]


def summarise(
    name: str, results: list[Result], regular: list[Result], seconds: list[float]
) -> Measurement:
    """Adds up the counts of one way."""
    stats = [result.stats for result in results]
    return Measurement(
        name,
        sum(r.stats.tokens_per_call * r.stats.target_calls for r in results),
        sum(s.target_calls for s in stats),
        sum(s.drafted for s in stats),
        sum(s.accepted for s in stats),
        [r.tokens for r in results] == [r.tokens for r in regular],
        seconds,
    )


def table(measured: list[Measurement], greedy: bool) -> str:
    """A Markdown table, one way a row."""
    base = measured[0].seconds
    lines = [
        "| way | tokens/call | target calls | acceptance | tokens/s | speed-up (range) | same |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for m in measured:
        ratios = sorted(a / b for a, b in zip(base, m.seconds, strict=True))
        cells = [
            m.name,
            f"{m.decided / m.target_calls:.2f}",
            f"{m.target_calls}",
            f"{m.accepted / m.drafted:.0%}" if m.drafted else "",
            f"{m.decided / statistics.median(m.seconds):.0f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            ("yes" if m.same else "NO") if greedy else "sampled",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 if greedy outputs differ."""
    args = parser().parse_args(argv)
    stream = corpus.examples(args.seed, held_out=True, translated=TASKS[args.task])
    prompts = [example.source for example in itertools.islice(stream, args.count)]
    options = {"max_tokens": 200, "temp": args.temp, "seed": 0, "batch_size": args.batch_size}
    decoders = ways(args)
    dtype = str(decoders[REGULAR].model.shared.weight.dtype).removeprefix("mlx.core.")
    print(
        f"{args.task}: {args.count} held-out prompts, batch {args.batch_size}, temp {args.temp}, "
        f"{args.repeats} repeats; {platform.machine()} {mx.default_device()}, "
        f"mlx {version('mlx')}, {dtype}"
    )
    measured = measure(decoders, prompts, options, args.repeats)
    print(table(measured, args.temp == 0))
    if args.json:
        args.json.write_text(json.dumps([asdict(m) for m in measured], indent=2) + "\n")
    return int(args.temp == 0 and not all(m.same for m in measured))


def parser() -> Parser:
    """All options."""
    result = Parser(description=__doc__.split("\n\n")[0])
    add = result.add_argument
    add("--model", default=str(DEMO / "target"), help="folder of the target")
    add("--draft-model", default=str(DEMO / "draft"), help="folder of the draft")
    add("--dtype", help="compute in this type (default: the folder's; float32 without a GPU)")
    add("--task", choices=list(TASKS), default="fix", help="default: %(default)s")
    add("--count", type=int, default=40, help="prompts (default: %(default)s)")
    add(
        "--num-draft",
        type=lambda text: AUTO if text == AUTO else int(text),
        nargs="+",
        default=[2, 3, 4, 5, 6, 7, 8, AUTO],
        metavar="N",
        help="numbers, or auto",
    )
    add("--batch-size", type=int, default=1, help="rows in flight (default: %(default)s)")
    add("--temp", type=float, default=0.0, help="default: %(default)s")
    add("--repeats", type=int, default=3, help="counted runs of each way (default: %(default)s)")
    add("--seed", default="benchmark", help="of the held-out sample")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return result


if __name__ == "__main__":
    sys.exit(main())
