"""`quantize`: what fewer bits a weight cost, on the way to the bits that convert.py should write.

The target is quantised in memory in every way that convert.py has and in some that it has not, to
see which layers want more bits, and compared with itself as it was: its logits along the texts that
it wrote, the texts that it writes now, and how many of an unquantised draft's proposals it keeps.
Then the draft is quantised instead. Everything is computed in float32, and nothing is timed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import options, printing, workload
from benchmarks.extras import needed
from benchmarks.quality import points, quality
from benchmarks.quantized import Texts, difference, quantized
from benchmarks.subject import Subject, begin, counts, decoding
from benchmarks.workload import Workload
from decoder import SpeculativeDecoder
from mlx_t5.backend import nn, tree_flatten
from mlx_t5.checkpoints.quantization import (
    EMBED_8,
    MIXED_BITS,
    MODES,
    Quantization,
    Recipe,
    quantize_predicate,
)
from mlx_t5.cli.arguments import add_number, at_least
from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config
from mlx_t5.network.memory import weight_bytes
from mlx_t5.requests import Result
from model import T5

BITS = (8, 6, 5, 4, 3, 2)
BATCH = 32  # prompts decoded at the same time; a text does not depend on it
PLAIN = "bfloat16"
# Layers that may need more bits: name → what to look for in their paths. `MIXED_BITS` has v and o.
PARTS = MappingProxyType(
    {
        "q and k": r"\.[qk]$",
        "v": r"\.v$",
        "o": r"\.o$",
        "wi": r"\.wi(_\d)?$",
        "wo": r"\.wo$",
        "v and wo": r"\.(v|wo)$",
        "cross-attention": "cross_attention",
        "encoder": "^encoder",
        "decoder": "^decoder",
        "first layers": r"layers\.0\.",
    }
)

SIZE: printing.Columns = {
    "bytes": lambda row: f"{row['bytes']:,}",
    "of bfloat16": lambda row: printing.percent(row["of_bfloat16"]),
}
TARGETS: printing.Columns = {
    "target": lambda row: row["way"],
    **SIZE,
    "logit error": lambda row: f"{row['error']:.4f}",
    "of uniform": lambda row: f"{row['of_uniform']:.2f}" if row["of_uniform"] else "",
    "KL": lambda row: f"{row['kl']:.5f}",
    "same token": lambda row: f"{row['top_1']:.2%}",
    "same text": points("exact_match_lossless"),
    "chrF to it": points("chrf_lossless"),
    "exact match": points("exact_match"),
    "chrF": points("chrf"),
    **printing.ACCEPTANCE,
}
DRAFTS: printing.Columns = {
    "draft": lambda row: row["way"],
    **SIZE,
    **printing.ACCEPTANCE,
    **printing.TOKENS_PER_CALL,
    "same text": TARGETS["same text"],
}
NOTES = (
    "Logit error: root mean square of the difference, relative to that of the unquantised logits; "
    "of uniform: the same divided by that of uniform bits at equal size, so less than 1 pays. KL "
    "in nats a token. Same token, same text and chrF to it: against the unquantised model; exact "
    "match and chrF: against the right answers. Bytes: of the weights as convert.py writes them."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser, dtype=False)
    options.add_prompts(parser, 100, ["mixed"])
    add_number(parser, "--num-draft", type=at_least(1), default=5, help="tokens drafted at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.set_defaults(dtype="float32")


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if a quantised draft changes a text."""
    needed("sacrebleu")
    subject, facts = begin(args, command, ["sacrebleu"], num_draft=args.num_draft)
    for name, model in ((args.model, subject.target), (args.draft_model, subject.draft)):
        require_unquantized(name, model)
    tables: list[dict[str, Any]] = []
    for task in [None] if args.prompts else list(dict.fromkeys(args.task)):
        prompts = workload.chosen(task, args.prompts, args.count)
        trial = Trial(subject, prompts, args)
        targets, drafts = trial.targets(), trial.drafts()
        print(f"\n{prompts.name}: {len(prompts.prompts)} prompts, {trial.positions} tokens")
        print(f"\n{printing.markdown(TARGETS, targets)}\n\n{printing.markdown(DRAFTS, drafts)}")
        table = {"task": prompts.name, "count": len(prompts.prompts), "tokens": trial.positions}
        tables.append({**table, "targets": targets, "drafts": drafts})
    print(f"\n{NOTES}")
    printing.write_record(args.json, {"command": command, "environment": facts, "tables": tables})
    rows = [row for table in tables for row in table["drafts"]]
    return int(any(row["exact_match_lossless"] < 100 for row in rows))


def require_unquantized(name: str, model: T5) -> None:
    """Refuses a model that has been quantised before.

    Raises:
        UserError: it has.
    """
    if any(path.endswith(".scales") for path, _ in tree_flatten(model.parameters())):
        raise UserError(f"{name} is quantised already; give the folder that it was made of")


def group_size(model: T5) -> int:
    """The group size of convert.py, or the smallest if rows of this model do not divide into it."""
    usual, *others = MODES["affine"][1]
    whole = all(layer.weight.shape[-1] % usual == 0 for layer in _layers(model))
    return usual if whole else min(others)


def _layers(model: T5) -> list[nn.Module]:
    return [layer for path, layer in model.named_modules() if quantize_predicate(path, layer)]


def uniform(group: int) -> dict[str, Recipe | None]:
    """The same bits for every layer, and none at all."""
    return {PLAIN: None} | {f"{bits} bits": Recipe.from_options(bits, group) for bits in BITS}


def with_embedding(group: int) -> dict[str, Recipe | None]:
    """The same bits for every layer, and 8 for the embedding and the output head."""
    return {
        f"{bits} bits, {EMBED_8}": Recipe.from_options(bits, group, predicate=EMBED_8)
        for bits in (8, 4)
    }


def recipes(config: T5Config, group: int) -> dict[str, Recipe | None]:
    """Every way to quantise the target: of convert.py first, then what it might have."""
    result = uniform(group)
    for size in sorted(set(MODES["affine"][1]) - {group}):
        groups = f", groups of {size}"
        result |= {f"{n} bits{groups}": Recipe.from_options(n, size) for n in (4, 3)}
        result |= {f"vo_4_5{groups}": Recipe.from_options(None, size, predicate="vo_4_5")}
    result |= {mode: Recipe.from_options(mode=mode) for mode in MODES if mode != "affine"}
    result |= {name: Recipe.from_options(None, group, predicate=name) for name in MIXED_BITS}
    result |= with_embedding(group)
    both = f"vo_4_5+{EMBED_8}"
    result[both] = Recipe.from_options(None, group, predicate=both)
    last = rf"encoder\.layers\.{config.num_layers - 1}\.|"
    last += rf"decoder\.layers\.{config.num_decoder_layers - 1}\."
    four, five = Quantization.from_options(4, group), Quantization.from_options(5, group)
    for part, where in {**PARTS, "last layers": last}.items():
        result[f"4 bits, 5 in {part}"] = Recipe(four, five, where)
    for low, high in ((2, 4), (2, 6), (3, 6), (4, 8)):
        most, special = (Quantization.from_options(bits, group) for bits in (low, high))
        result[f"{low} bits, {high} in v and o"] = Recipe(most, special)
    return result


def of_uniform(rows: Sequence[dict], size: int, error: float) -> float | None:
    """An error divided by that of uniform bits at the same size.

    Args:
        rows: with the `bytes` and `error` of uniform bits; between them, the error's logarithm is
            taken to be a straight line, which it nearly is.
        size: bytes of the weights.
        error: that they have.

    Returns:
        The quotient; None outside of what the rows span.
    """
    known = sorted((row["bytes"], math.log(row["error"])) for row in rows if row["error"] > 0)
    for (small, high), (large, low) in zip(known, known[1:], strict=False):
        if small <= size <= large:
            share = (size - small) / (large - small)
            return error / math.exp(high + share * (low - high))
    return None


class Trial:
    """Quantised models against the unquantised pair, on one set of prompts.

    Attributes:
        positions: tokens that logits are compared at.
    """

    def __init__(self, subject: Subject, prompts: Workload, args: argparse.Namespace) -> None:
        """Decodes the prompts with the target as it is."""
        self.subject, self.prompts, self.args = subject, prompts, args
        own = self._decoded(subject.regular())
        self.own = [result.text or "" for result in own]
        start = subject.target.config.decoder_start_token_id
        sources = [subject.tokenizer.encode(prompt) for prompt in prompts.prompts]
        self.texts = Texts(sources, [[start, *result.tokens] for result in own])
        self.positions = sum(map(len, self.texts.fed))

    def targets(self) -> list[dict]:
        """The figures of every recipe for the target."""
        target, group = self.subject.target, group_size(self.subject.target)
        rows = []
        for way, recipe in recipes(target.config, group).items():
            model = quantized(target, recipe)
            apart = asdict(difference(model, target, self.texts))
            rows.append(self._row(way, target, recipe, (model, self.subject.draft)) | apart)
        curve = [row for row in rows if row["way"] in uniform(group)]
        for row in rows:
            row["of_uniform"] = of_uniform(curve, row["bytes"], row["error"])
        return rows

    def drafts(self) -> list[dict]:
        """The figures of a quantised draft with the target as it is."""
        target, draft = self.subject.target, self.subject.draft
        group = group_size(draft)
        return [
            self._row(way, draft, recipe, (target, quantized(draft, recipe)))
            for way, recipe in (uniform(group) | with_embedding(group)).items()
        ]

    def _row(self, way: str, model: T5, recipe: Recipe | None, pair: tuple[T5, T5]) -> dict:
        """Sizes of a model in one way, and what a pair with it does."""
        shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
        size = weight_bytes(shapes, 2, recipe)
        target, draft = pair
        results = self._decoded(
            SpeculativeDecoder(target, draft, self.subject.tokenizer, self.args.num_draft)
        )
        counted = counts(results)
        texts = [result.text or "" for result in results]
        return {
            "way": way,
            "bytes": size,
            "of_bfloat16": size / weight_bytes(shapes, 2),
            "acceptance_rate": counted["accepted"] / max(1, counted["drafted"]),
            "tokens_per_call": counted["decided"] / counted["target_calls"],
            **counted,
            **quality(texts, self.prompts.references, self.own),
        }

    def _decoded(self, decoder: SpeculativeDecoder) -> list[Result]:
        longest = self.args.max_tokens
        return decoding(decoder, [self.prompts.prompts], BATCH, max_tokens=longest)(0)
