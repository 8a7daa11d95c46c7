"""A model as quantising leaves it, and how far its logits are from those of the original.

Weights go through `quantization.py` as in convert.py, from its default bfloat16, and back into
float32: the very numbers that a converted folder computes with, in ordinary matrix products, which
without a GPU are many times faster than quantised ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.quantization import Quantization, Recipe
from mlx_t5.network.weights import HEAD, cast
from mlx_t5.text.prompts import padded
from model import T5

BATCH = 16  # texts whose logits are computed at the same time


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
        how = recipe.for_layer(name, array.shape) if recipe else None
        weights.append((name, _restored(how, name, rows) if how else rows.astype(mx.float32)))
    result = T5(model.config, separate_head=any(name == HEAD for name, _ in weights))
    result.load_weights(weights)
    mx.eval(result.parameters())
    return result


def _restored(how: Quantization, name: str, rows: mx.array) -> mx.array:
    """Rows quantised and put back; scales and offsets become float32 as on loading."""
    arrays = [
        array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
        for array in how.quantize(name, rows).values()
    ]
    return mx.dequantize(*arrays, **asdict(how), dtype=mx.float32)


@dataclass(frozen=True)
class Texts:
    """Texts as the original decodes them, to compare logits along.

    Attributes:
        sources: token ids of the prompts.
        fed: what the decoder is given of each: the start token and the text.
    """

    sources: Sequence[Sequence[int]]
    fed: Sequence[Sequence[int]]


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


def difference(model: T5, original: T5, texts: Texts) -> Difference:
    """Compares two models on the same texts, each position knowing the right ones before it."""
    sums = [0.0] * 4
    for first in range(0, len(texts.fed), BATCH):
        rows = slice(first, first + BATCH)
        ids, mask = padded(texts.sources[rows], model.config.pad_token_id)
        tokens, counted = padded(texts.fed[rows], model.config.pad_token_id)
        right, found = (each(ids, tokens, mask) for each in (original, model))
        parts = _sums(right, found, mx.ones(tokens.shape) if counted is None else counted).tolist()
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    off, own, kl, same = sums
    positions = sum(map(len, texts.fed))
    return Difference(math.sqrt(off / own), max(0.0, kl / positions), same / positions)


def _sums(right: mx.array, found: mx.array, counted: mx.array) -> mx.array:
    """Four sums over the positions (B, T) that are `counted`; logits are (B, T, V)."""
    right, found = (x - mx.mean(x, axis=-1, keepdims=True) for x in (right, found))
    p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (right, found))
    off, own, kl = (
        mx.sum(part, axis=-1)
        for part in (mx.square(found - right), mx.square(right), mx.exp(p) * (p - q))
    )
    same = mx.argmax(right, axis=-1) == mx.argmax(found, axis=-1)
    return mx.stack([mx.sum(mx.where(counted, part, 0.0)) for part in (off, own, kl, same)])
