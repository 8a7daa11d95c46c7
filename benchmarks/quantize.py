"""`quantize`: what fewer bits a weight cost, to choose those that convert.py should write.

The target is quantised in memory by the recipes that convert.py has, and compared with itself as it
was: its logits along the texts that it wrote, the texts that it writes now, and how many of an
unquantised draft's proposals it keeps. Then the draft is quantised instead. Nothing is timed.

Weights go through `quantization.py` as in convert.py, from its default bfloat16, and back into
float32: the very numbers that a converted folder computes with, in ordinary matrix products, which
without a GPU are many times faster than quantised ones.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import printing, workload
from benchmarks.quality import points, quality
from benchmarks.subject import Subject, begin, decoding
from benchmarks.workload import REGULAR, Workload
from decoder import SpeculativeDecoder
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.quantization import (
    EMBED_8,
    MODES,
    PREDICATES,
    VO_4_5,
    Quantization,
    Recipe,
    quantize_predicate,
)
from mlx_t5.cli.arguments import add_number, at_least
from mlx_t5.drafting.tally import Tally
from mlx_t5.engine.rows import Result
from mlx_t5.errors import UserError
from mlx_t5.network.encoding import padded
from mlx_t5.network.memory import weight_bytes
from mlx_t5.network.weights import HEAD, cast
from model import T5

BITS = (8, 6, 5, 4, 3, 2)
BATCH = 32  # prompts decoded at the same time; a text does not depend on it
LOGITS_BATCH = 16  # texts whose logits are computed at the same time, at most
LOGITS_A_POSITION = 1 << 20  # of all of them together
PLAIN = "bfloat16"
Tokens = Sequence[int]

SIZE: printing.Columns = {
    "bytes": lambda row: f"{row['bytes']:,}",
    "of bfloat16": lambda row: printing.percent(row["of_bfloat16"]),
}
TARGETS: printing.Columns = {
    "target": lambda row: row["way"],
    **SIZE,
    "logit error": lambda row: f"{row['error']:.4f}",
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
    "Logit error: root mean square of the difference, relative to that of the unquantised logits. "
    "KL in nats a token. Same token, same text and chrF to it: against the unquantised model; "
    "exact match and chrF: against the right answers. Bytes: of the weights as convert.py writes "
    "them."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    workload.add_models(parser, dtype=False)
    workload.add_prompts(parser, 100, ["mixed"])
    add_number(parser, "--num-draft", type=at_least(1), default=5, help="tokens drafted at a time")
    workload.add_json(parser)
    parser.set_defaults(dtype="float32")


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if a quantised draft changes a text."""
    importlib.import_module("sacrebleu")  # if it is missing, that is said before the work
    subject, facts = begin(args, command, ["sacrebleu"], num_draft=args.num_draft)
    for name, model in ((args.model, subject.target), (args.draft_model, subject.draft)):
        require_unquantized(name, model)
    tables: list[dict[str, Any]] = []
    for prompts in workload.workloads(args):
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


def recipes(model: T5) -> dict[str, Recipe | None]:
    """The recipes for a model, by what a table calls them."""
    group = group_size(model)
    result: dict[str, Recipe | None] = {PLAIN: None}
    result |= {f"{bits} bits": Recipe.from_options(bits, group) for bits in BITS}
    result |= {mode: Recipe.from_options(mode=mode) for mode in MODES if mode != "affine"}
    for bits in (8, 4):
        result[f"{bits} bits, {EMBED_8}"] = Recipe.from_options(bits, group, predicate=EMBED_8)
    others = [name for name in PREDICATES if VO_4_5 in name]
    return result | {name: Recipe.from_options(None, group, predicate=name) for name in others}


def group_size(model: T5) -> int:
    """The group size of convert.py, or the smallest if rows of this model do not divide into it."""
    default, *others = MODES["affine"][1]
    layers = (layer for path, layer in model.named_modules() if quantize_predicate(path, layer))
    divides = all(layer.weight.shape[-1] % default == 0 for layer in layers)
    return default if divides else min(others)


class Trial:
    """Quantised models against the unquantised pair, on one set of prompts.

    Attributes:
        positions: tokens that logits are compared at.
    """

    def __init__(self, subject: Subject, prompts: Workload, args: argparse.Namespace) -> None:
        """Decodes the prompts with the target as it is."""
        self.subject, self.prompts, self.args = subject, prompts, args
        results = self._decoded(subject.decoder(REGULAR))
        self.lossless = [result.text or "" for result in results]
        start = subject.target.config.decoder_start_token_id
        sources = map(subject.tokenizer.encode, prompts.prompts)
        fed = ([start, *result.tokens] for result in results)
        self.texts = list(zip(sources, fed, strict=True))
        self.positions = sum(len(tokens) for _, tokens in self.texts)

    def targets(self) -> list[dict]:
        """The figures of every recipe for the target."""
        target, draft = self.subject.target, self.subject.draft
        rows = []
        for name, recipe in recipes(target).items():
            model = quantized(target, recipe)
            lost = asdict(difference(model, target, self.texts))
            rows.append(self._row(name, target, recipe, (model, draft)) | lost)
        return rows

    def drafts(self) -> list[dict]:
        """The figures of a quantised draft with the target as it is."""
        target, draft = self.subject.target, self.subject.draft
        return [
            self._row(name, draft, recipe, (target, quantized(draft, recipe)))
            for name, recipe in recipes(draft).items()
        ]

    def _row(self, name: str, model: T5, recipe: Recipe | None, pair: tuple[T5, T5]) -> dict:
        """Sizes of a model by one recipe, and what a pair with it does."""
        shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
        size = weight_bytes(shapes, 2, recipe)
        target, draft = pair
        results = self._decoded(
            SpeculativeDecoder(target, draft, self.subject.tokenizer, self.args.num_draft)
        )
        tally = Tally.of(results)
        texts = [result.text or "" for result in results]
        return {
            "way": name,
            "bytes": size,
            "of_bfloat16": size / weight_bytes(shapes, 2),
            "acceptance_rate": tally.acceptance or 0.0,
            "tokens_per_call": tally.tokens_per_call,
            "target_calls": tally.target_calls,
            **quality(texts, self.prompts.references, self.lossless),
        }

    def _decoded(self, decoder: SpeculativeDecoder) -> list[Result]:
        longest = self.args.max_tokens
        return decoding(decoder, [self.prompts.prompts], BATCH, max_tokens=longest)(0)


def quantized(model: T5, recipe: Recipe | None) -> T5:
    """The model that convert.py makes of this one.

    Args:
        model: in float32; left as it is.
        recipe: how its layers are quantised; None rounds them to bfloat16, as convert.py does
            without -q.
    """
    weights = []
    for name, array in tree_flatten(model.parameters()):
        rows = cast(name, array, mx.bfloat16)
        layer = recipe.for_layer(name, array.shape) if recipe else None
        weights.append((name, _restored(layer, name, rows) if layer else rows.astype(mx.float32)))
    result = T5(model.config, separate_head=any(name == HEAD for name, _ in weights))
    result.load_weights(weights)
    mx.eval(result.parameters())
    return result


def _restored(quantization: Quantization, name: str, rows: mx.array) -> mx.array:
    """Rows quantised and put back; scales and offsets become float32 as on loading."""
    arrays = [
        array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
        for array in quantization.quantize(name, rows).values()
    ]
    return mx.dequantize(*arrays, **asdict(quantization), dtype=mx.float32)


@dataclass(frozen=True)
class Difference:
    """How far logits are from those of the original, over all positions of some texts.

    Attributes:
        error: root mean square of what differs, relative to that of the original's own logits;
            both after subtracting each position's mean, which changes no probability.
        kl: mean Kullback-Leibler divergence of the probabilities from the original's, in nats.
        top_1: share of positions where both have the same likeliest token.
    """

    error: float
    kl: float
    top_1: float


def difference(model: T5, original: T5, texts: Sequence[tuple[Tokens, Tokens]]) -> Difference:
    """Compares two models along texts, each position knowing the right tokens before it.

    Args:
        model: the quantised one.
        original: the other.
        texts: source tokens, and what the decoder is fed: the start token and the text.
    """
    sums = [0.0] * 4
    at_once = max(1, min(LOGITS_BATCH, LOGITS_A_POSITION // model.config.vocab_size))
    for batch in workload.cut(texts, at_once):
        sources, fed = zip(*batch, strict=True)
        ids, mask = padded(sources, model.config.pad_token_id)
        tokens, counted = padded(fed, model.config.pad_token_id)
        right, other = (m(ids, tokens, mask) for m in (original, model))
        parts = _sums(right, other, mx.ones(tokens.shape) if counted is None else counted).tolist()
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    squared_error, square, kl, same = sums
    positions = sum(len(fed) for _, fed in texts)
    error = math.sqrt(squared_error / square)
    return Difference(error, max(0.0, kl / positions), same / positions)


def _sums(right: mx.array, other: mx.array, counted: mx.array) -> mx.array:
    """Four sums over the positions (B, T) that are `counted`; logits are (B, T, V)."""
    right, other = (x - mx.mean(x, axis=-1, keepdims=True) for x in (right, other))
    p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (right, other))
    squared_error, square, kl = (
        mx.sum(terms, axis=-1)
        for terms in (mx.square(other - right), mx.square(right), mx.exp(p) * (p - q))
    )
    same = mx.argmax(right, axis=-1) == mx.argmax(other, axis=-1)
    figures = (squared_error, square, kl, same)
    return mx.stack([mx.sum(mx.where(counted, figure, 0.0)) for figure in figures])
