"""Tests fingerprint.py: one model in all types, and models that differ in one number."""

import pytest

from convert import convert
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.network.fingerprint import fingerprint, same_model
from model import load
from random_models import random_t5


def test_the_fingerprint_survives_types_and_quantization(reference_of, tmp_path):
    folder = reference_of("flan").folder
    plain = fingerprint(load(folder, "float32")[0])
    in_bits = {"quantize": True, "q_group_size": 32, "quant_predicate": "embed_8"}
    quantized = fingerprint(load(convert(folder, tmp_path / "q", "float32", **in_bits))[0])
    assert quantized["fingerprint"] == plain["fingerprint"]
    assert quantized["weights"] != plain["weights"]
    assert fingerprint(load(folder, "bfloat16")[0]) == plain
    for other in (fingerprint(load(folder, "float16")[0]), quantized):
        assert same_model(plain, other) and same_model(other, plain)
    assert not same_model(plain, fingerprint(random_t5(seed=3)))


@pytest.mark.parametrize("change, same", [(0.003, True), (0.03, False)])
@pytest.mark.parametrize(
    "name",
    [
        "encoder.norm", "encoder.layers.0.feed_forward.wi_1", "shared", "decoder.norm",
        "decoder.layers.0.self_attention.k", "decoder.layers.0.cross_attention.o", "lm_head",
        "decoder.relative_attention_bias.0",
    ],
)  # fmt: skip
def test_the_fingerprint_changes_with_one_weight(reference_of, name, change, same):
    """The change is in the last column of a weight."""
    model, _ = load(reference_of("flan").folder, "float32")
    before = fingerprint(model)
    weight = dict(tree_flatten(model.parameters()))[f"{name}.weight"]
    place = (..., weight.shape[-1] - 1)
    changed = mx.array(weight)
    changed[place] = weight[place] * (1 + change)
    model.load_weights([(f"{name}.weight", changed)], strict=False)
    assert same_model(before, fingerprint(model)) is same


def test_a_norm_that_is_nan_equals_no_other():
    model = random_t5(seed=3)
    model.encoder.norm.weight[-1] = mx.nan
    assert not same_model(fingerprint(model), fingerprint(model))
