"""Tests quantization.py: the numbers of nn.quantize, and clear errors for unsupported modes."""

from __future__ import annotations

import json

import numpy as np
import pytest

import checkpoints
from checkpoints import TINY, arrays
from devices import skip_narrow_4_bits
from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints import checkpoint, quantization
from mlx_t5.checkpoints.quantization import MODES, Quantization, Recipe
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.model import load


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    (("affine", 4, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)),
)
def test_each_mode_has_its_defaults(mode, bits, group):
    assert Quantization.from_options(mode=mode) == Quantization(group, bits, mode)


Q = "encoder.block.0.layer.0.SelfAttention.q.weight"
EVERY_MODE = [
    (mode, bits, group) for mode in MODES for bits in MODES[mode][0] for group in MODES[mode][1]
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "bits", "group"), [*EVERY_MODE, ("affine", "vo_4_5", 32)])
def test_quantized_weights_equal_those_of_mlx(tiny, tmp_path, mode, bits, group):
    """The output equals the same model after `nn.quantize`, layer by layer."""
    mixed = bits == "vo_4_5"
    options = {"quant_predicate": bits} if mixed else {"q_bits": bits, "q_mode": mode}
    out = convert(tiny, tmp_path / "out", "float32", quantize=True, q_group_size=group, **options)
    how = {"group_size": group, "bits": 4 if mixed else bits, "mode": mode}
    model, _ = load(tiny, "float32")
    ways = {
        path: how | {"bits": 5} if mixed and path[-2:] in (".v", ".o") else how
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and path != "lm_head"
        if layer.weight.shape[-1] % group == 0
    }
    config = json.loads((out / "config.json").read_text())
    exceptions = {path: way for path, way in ways.items() if way != how}
    assert config["quantization"] == config["quantization_config"] == how | exceptions
    nn.quantize(model, class_predicate=lambda path, _: ways.get(path, False))
    expected, converted = dict(tree_flatten(model.parameters())), arrays(out)
    assert set(converted) == set(expected)
    for name, array in expected.items():
        assert array.dtype == converted[name].dtype and mx.array_equal(array, converted[name]), name
    skip_narrow_4_bits(how["bits"], mode)
    ids = mx.array([[5, 3, 9, 1]])
    loaded, _ = load(out, "float32")  # joined layers are products of other shapes
    np.testing.assert_allclose(loaded(ids, ids), model(ids, ids), atol=1e-5)


@pytest.mark.parametrize("tied", (True, False), ids=("tied", "separate"))
@pytest.mark.parametrize(
    "options",
    (
        {"q_bits": 8, "quant_predicate": "embed_8"},
        {"q_bits": 4, "quant_predicate": "embed_8"},
        {"quant_predicate": "vo_4_5+embed_8"},
    ),
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_an_8_bit_embedding_and_head_equal_their_dequantized_weights(
    reference_of, tmp_path, tied, options
):
    """This holds for look-ups, for products and, if the head is tied, for scaled products."""
    source = reference_of("t5" if tied else "flan").folder
    out = convert(source, tmp_path / "out", "float32", quantize=True, q_group_size=32, **options)
    model, plain = load(out, "float32")[0], load(source, "float32")[0]
    entry = json.loads((out / "config.json").read_text())["quantization"]
    embeddings = ["shared"] if tied else ["shared", "lm_head"]
    for name in embeddings:
        how = {name: entry[name] for name in ("group_size", "bits", "mode")} | entry.get(name, {})
        assert how == {"group_size": 32, "bits": 8, "mode": "affine"}
        assert f"{name}.scales" in arrays(out)
    dense = load(out, "float32")[0]
    for name in embeddings:
        layer = model[name]
        parts = layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits
        setattr(dense, name, getattr(plain, name))
        before, after = plain[name].weight, mx.dequantize(*parts)
        assert 0 < mx.abs(before - after).max() < mx.abs(before).max() / 127
        getattr(dense, name).weight = after
    ids = mx.array([[5, 3, 9, 1], [7, 7, 2, 1]])
    logits, expected = model(ids, ids), dense(ids, ids)
    assert mx.abs(logits - expected).max() < 1e-4 * mx.abs(expected).max()
    regular = SpeculativeDecoder(model).generate([[5, 3, 9, 1]], max_tokens=12)[0]
    drafted = SpeculativeDecoder(model, plain, None, 5).generate([[5, 3, 9, 1]], max_tokens=12)[0]
    assert drafted.tokens == regular.tokens and drafted.stats.drafted


def test_the_embedding_of_a_large_vocabulary_gets_8_bits(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "LARGE_VOCABULARY", TINY["vocab_size"])
    configs = {}
    for predicate in (None, "embed_8", "layers"):
        out = convert(tiny, tmp_path / str(predicate), quantize=True, quant_predicate=predicate)
        configs[predicate] = json.loads((out / "config.json").read_text())
        note = "40 tokens: the embedding and the output head get 8 bits; avoid it by --quant"
        assert (note in capsys.readouterr().err) == (predicate is None)
        bits = configs[predicate]["quantization"].get("shared", {}).get("bits")
        assert bits == (None if predicate == "layers" else 8)
    assert configs[None] == configs["embed_8"]


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_a_quantized_embedding_does_not_hide_the_type_of_a_model(
    tiny, tmp_path, dtype, monkeypatch
):
    """By default a GPU computes in the folder's type, and memory is counted in that type."""
    monkeypatch.setattr(checkpoint, "on_cpu", lambda: False)
    out = convert(tiny, tmp_path / "out", dtype, quantize=True, quant_predicate="embed_8")
    quantized, plain = load(out)[0], load(tiny, dtype)[0]
    assert quantized.dtype == quantized.shared.scales.dtype == getattr(mx, dtype)
    assert quantized.cache_memory(2, 3, 4) == plain.cache_memory(2, 3, 4)
    assert quantized.encoder_memory(2, 3) == plain.encoder_memory(2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"predicate": "vo_3_5"}, "unknown --quant-predicate 'vo_3_5'; known: vo_4_5, "),
        ({"predicate": "vo_4_5", "bits": 4}, "vo_4_5 says .* itself; leave --q-bits out"),
        ({"predicate": "vo_4_5", "mode": "mxfp4"}, "leave --q-mode mxfp4 out"),
        ({"bits": 7}, "--q-bits 7 does not exist in mode affine; choose 2, 3, 4, 5, 6, 8"),
        ({"mode": "nvfp4", "group_size": 32}, "--q-group-size 32 .* mode nvfp4; choose 16"),
        ({"mode": "int4"}, "unknown quantization mode 'int4'; known: affine, mxfp4, mxfp8, nvfp4"),
    ),
)
def test_contradictory_recipes_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Recipe.from_options(**options)


def test_an_embedding_in_8_bits_is_affine_in_every_mode():
    mxfp4 = Recipe.from_options(mode="mxfp4", predicate="embed_8")
    assert mxfp4.embedding == Quantization.from_options(8) and mxfp4.general.mode == "mxfp4"


@pytest.mark.parametrize(
    ("mode", "bits", "size", "taken"),
    (
        ("nvfp4", 4, 0.003, "mxfp4"),  # like the queries of t5-11b
        ("nvfp4", 4, 0.03, "nvfp4"),
        ("affine", 4, 1e-9, "mxfp4"),
        ("affine", 8, 1e-9, None),  # 4 bits instead of 8 would be a loss as well
        ("affine", 2, 0.003, "affine"),  # weights near zero become zero, as they should
        ("mxfp4", 4, 1e-39, None),  # would be infinite
        ("mxfp8", 8, 1e-37, None),
    ),
)
def test_layers_that_a_mode_would_make_zero_take_another(tmp_path, capsys, mode, bits, size, taken):
    state = checkpoints.random_state(TINY)
    queries = {name for name in state if name.endswith("SelfAttention.q.weight")}
    for name in queries:
        state[name] *= size / state[name].std()
    source, how = checkpoints.save(state, tmp_path / "in", config=TINY), {"q_bits": bits}
    out = convert(source, tmp_path / "out", "float32", quantize=True, q_mode=mode, **how)
    layer = load(out, "float32")[0].encoder.layers[0].self_attention.q
    assert getattr(layer, "mode", None) == taken
    if taken and bits > 2:
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": taken}
        restored = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)
        error = mx.linalg.norm(restored - mx.array(state[Q].numpy()))
        assert error < 0.2 * size * 64
    move = f"({taken or 'float32'} instead of {mode})"
    kinds = (f"{stack}.layers.*.self_attention.q {move}" for stack in ("decoder", "encoder"))
    note = f"some weights would become zero: {', '.join(kinds)}\n"
    told = [line for line in capsys.readouterr().err.splitlines(True) if "become zero" in line]
    assert told == ([note] if taken != mode else [])


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_quantized_scales_have_the_models_type(tiny, tmp_path, dtype):
    """With float16, `wo` computes in float32, so its scales and offsets are float32 too."""
    converted = arrays(convert(tiny, tmp_path / "out", quantize=True, dtype=dtype))
    for name, array in converted.items():
        if ".relative" in name or name == "shared.weight" or "norm" in name:
            assert array.dtype == getattr(mx, dtype) and name.endswith(".weight")
        elif name.endswith(".weight"):
            assert array.dtype == mx.uint32
        else:
            is_wide = dtype == "float16" and ".wo." in name
            assert array.dtype == (mx.float32 if is_wide else getattr(mx, dtype))


def test_layers_that_do_not_divide_into_groups_stay_unquantized(tmp_path, capsys):
    config = TINY | {"d_ff": 96}
    checkpoints.save(checkpoints.random_state(config), tmp_path / "in", config=config)
    out = convert(tmp_path / "in", tmp_path / "out", quantize=True)
    names = set(arrays(out))
    assert "encoder.layers.0.feed_forward.wi.scales" in names  # rows of 64
    assert "encoder.layers.0.feed_forward.wo.scales" not in names  # rows of 96
    note = "4 layers do not divide into groups of 64 and stay bfloat16; 4 of them would with --q-gr"
    assert note in capsys.readouterr().err
    load(out)
    with pytest.raises(UserError, match="no layer's rows divide into groups of 128; choose"):
        convert(tmp_path / "in", tmp_path / "out2", quantize=True, q_group_size=128)
    assert not (tmp_path / "out2").exists()
