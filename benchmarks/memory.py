"""`memory`: what the public models take, by the function with which the program checks.

Nothing is measured or downloaded. Weights follow from the shapes that the models' config.json
files have on the Hugging Face Hub; caches are those of one prompt.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from benchmarks import printing
from demo.grow import SHAPES
from mlx_t5.checkpoints.default_drafts import default_draft
from mlx_t5.checkpoints.quantization import Recipe
from mlx_t5.cli.arguments import add_number, at_least
from mlx_t5.network.config import T5Config
from mlx_t5.network.memory import cache_bytes, encoder_bytes
from mlx_t5.network.weights import Shape
from mlx_t5.sizes import readable
from model import expected_parameters

BITS = (None, 8, 4)


def _t5(sizes: Mapping[str, int]) -> T5Config:
    return T5Config.from_dict({"model_type": "t5", **sizes})


def _gated(vocab_size: int, *sizes: int, **others: Any) -> T5Config:
    names = ("vocab_size", "d_model", "d_ff", "num_heads", "d_kv", "num_layers")
    shape: dict[str, Any] = dict(zip(names, (vocab_size, *sizes), strict=True))
    return T5Config(**shape, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **others)


V1_1 = MappingProxyType(
    {
        "small": (512, 1024, 6, 64, 8),
        "base": (768, 2048, 12, 64, 12),
        "large": (1024, 2816, 16, 64, 24),
        "xl": (2048, 5120, 32, 64, 24),
        "xxl": (4096, 10240, 64, 64, 24),
    }
)
MODELS = MappingProxyType(
    {
        **{name: _t5(sizes) for name, sizes in SHAPES.items() if sizes},
        **{f"flan-t5-{size}": _gated(32128, *shape) for size, shape in V1_1.items()},
        **{f"mt5-{size}": _gated(250112, *shape) for size, shape in V1_1.items()},
        "madlad400-3b-mt": _gated(256000, 1024, 8192, 16, 128, 32),
        "byt5-small": _gated(384, 1472, 3584, 6, 64, 12, num_decoder_layers=4),
    }
)


@dataclass(frozen=True)
class Need:
    """What a model takes, in bytes.

    Attributes:
        parameters: how many it has.
        weights: by number of bits a weight, None being bfloat16.
        prompt: caches and the encoder's work of one prompt, in bfloat16.
    """

    parameters: int
    weights: dict[int | None, int]
    prompt: int


def weight_bytes(shapes: Mapping[str, Shape], width: int, recipe: Recipe | None = None) -> int:
    """Bytes of a model's weights.

    Args:
        shapes: of the parameters, by our names.
        width: bytes of a number that is not quantised.
        recipe: how layers are quantised; None if they are not.
    """
    total = 0
    for name, shape in shapes.items():
        numbers, how = math.prod(shape), recipe.for_layer(name, shape) if recipe else None
        if how:  # a scale for each group, and in mode affine an offset
            group = 2 * width if how.mode == "affine" else 1
            total += numbers * how.bits // 8 + numbers // how.group_size * group
        else:
            total += numbers * width
    return total


def need(config: T5Config, source: int, target: int) -> Need:
    """What a model takes.

    Args:
        config: its shape.
        source: tokens of the prompt.
        target: tokens of the text.
    """
    shapes = expected_parameters(config, separate_head=not config.tie_word_embeddings)
    size = config.vocab_size
    recipes = {b: Recipe.from_options(b, vocab_size=size) if b else None for b in BITS}
    weights = {bits: weight_bytes(shapes, 2, recipe) for bits, recipe in recipes.items()}
    prompt = cache_bytes(config, 2, 1, source, target) + encoder_bytes(config, 2, 1, source)
    return Need(weight_bytes(shapes, 1), weights, prompt)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_number(parser, "--source", type=at_least(1), default=512, help="prompt's tokens")
    add_number(parser, "--target", type=at_least(1), default=512, help="text's tokens")


def run(args: argparse.Namespace, command: str) -> int:
    """Prints the table."""
    needs = {name: need(config, args.source, args.target) for name, config in MODELS.items()}
    titles = {bits: f"{bits} bits" if bits else "bfloat16" for bits in BITS}
    rows = []
    for name, size in needs.items():
        total = together(name, needs)
        row = {"model": name, "parameters": f"{size.parameters / 1e6:,.0f} M"}
        row |= {title: readable(size.weights[bits]) for bits, title in titles.items()}
        row |= {"a prompt": readable(size.prompt), "draft": draft_of(name) or ""}
        row |= {f"all, {title}": readable(total[bits]) for bits, title in titles.items()}
        rows.append(row)
    print(f"{command}\na prompt of {args.source} tokens and a text of {args.target}\n")
    print(printing.markdown({title: itemgetter(title) for title in rows[0]}, rows))
    return 0


def draft_of(name: str) -> str | None:
    """The default draft, in bfloat16, if the model has one."""
    draft = default_draft(name)
    return draft and draft.rpartition("/")[2]


def together(name: str, needs: dict[str, Need]) -> dict[int | None, int]:
    """Bytes of a target, its draft and one prompt in both, by the target's bits."""
    draft = needs.get(draft_of(name) or "")
    others = needs[name].prompt + (draft.weights[None] + draft.prompt if draft else 0)
    return {bits: weights + others for bits, weights in needs[name].weights.items()}
