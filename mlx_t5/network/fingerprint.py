"""Fingerprints distinguish models of the same shape, whatever type they are stored in.

A model's fingerprint is a dictionary with three entries of hexadecimal digits:

- `fingerprint`: numbers from the weights of the encoder's norms, which are never quantized.
- `weights`: a few numbers of every weight.
- `config`: a digest of the shape.

Numbers are in bfloat16, so a model has the same fingerprint in float32 and in bfloat16. The numbers
of a quantized weight are unknown and not compared. Older fingerprints have only the norms. An
adapter changes weights, but not the norms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx, tree_flatten

if TYPE_CHECKING:
    from model import T5

NORMS, CONFIG, WEIGHTS = "fingerprint", "config", "weights"  # in a draft's config.json
NUMBERS, SAMPLES = 128, 4  # numbers from all norms together, and numbers from each weight
# Tolerances between a model's types. float32 and bfloat16 agree; conversion to float16 may round a
# number to the next bfloat16.
RELATIVE, ABSOLUTE = 2.0**-7, 2.0**-24
OF_CONFIG = (
    "model_type", "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers",
    "num_heads", "relative_attention_num_buckets", "relative_attention_max_distance",
    "layer_norm_epsilon", "dense_act_fn", "is_gated_act", "scales_logits", "pad_token_id",
    "eos_token_ids", "decoder_start_token_id",
)  # fmt: skip


def fingerprint(model: T5) -> dict[str, str]:
    """Returns the fingerprint of a `model.T5`."""
    halves = ((layer.self_attention, layer.feed_forward) for layer in model.encoder.layers)
    norms = [*(half.norm for layer in halves for half in layer), model.encoder.norm]
    weights = mx.concatenate([norm.weight for norm in norms])
    facts = [getattr(model.config, name) for name in OF_CONFIG]
    facts.append(getattr(model, "lm_head", None) is not None)
    return {
        NORMS: _digits(_evenly(weights, NUMBERS)),
        CONFIG: hashlib.sha256(repr(facts).encode()).hexdigest()[:16],
        WEIGHTS: _digits(mx.concatenate(_samples(model))),
    }


def same_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two fingerprints are of the same model; False if either is malformed."""
    if not _alike(one.get(NORMS), other.get(NORMS), unknown=False):
        return False
    if {CONFIG, WEIGHTS} - (one.keys() & other.keys()):
        return True
    return one[CONFIG] == other[CONFIG] and _alike(one[WEIGHTS], other[WEIGHTS], unknown=True)


def _samples(model: T5) -> list[mx.array]:
    """Returns `SAMPLES` numbers of each weight, in the order of the weights' names.

    The numbers are NaN if the weight is quantized.
    """
    parameters, samples = dict(tree_flatten(model.parameters())), []
    for name in sorted(name for name in parameters if name.endswith("weight")):
        if name.removesuffix("weight") + "scales" not in parameters:
            samples.append(_evenly(parameters[name], SAMPLES))
        else:
            samples.append(mx.full((SAMPLES,), mx.nan, mx.bfloat16))
    return samples


def _evenly(weight: mx.array, count: int) -> mx.array:
    """Returns `count` numbers of a weight at evenly spaced places, from the first to the last."""
    places = np.linspace(0, weight.size - 1, count).astype(np.int64)
    at = np.unravel_index(places, weight.shape)
    return weight[tuple(mx.array(axis.astype(np.int32)) for axis in at)].astype(mx.bfloat16)


def _digits(numbers: mx.array) -> str:
    return np.array(numbers.view(mx.uint16)).astype(">u2").tobytes().hex()


def _alike(one: Any, other: Any, unknown: bool) -> bool:
    """Returns whether numbers agree up to rounding; if `unknown`, NaN agrees with any number."""
    try:
        a, b = (np.frombuffer(bytes.fromhex(digits), ">u2") for digits in (one, other))
    except (ValueError, TypeError):
        return False
    if not len(a) == len(b) > 0:
        return False
    a, b = ((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for bits in (a, b))
    largest = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore"):  # infinite and NaN numbers differ from all numbers
        same = np.abs(a - b) <= RELATIVE * largest + ABSOLUTE
    return bool(np.all(same | (np.isnan(a) | np.isnan(b)) & unknown))
