"""Tests loading of folders: every family, quantized, sharded and broken folders."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from devices import skip_narrow_4_bits
from families import SHAPE, UNTIED
from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints import checkpoint
from mlx_t5.checkpoints.checkpoint import keep_float32
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.names import HEAD
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.errors import UserError
from mlx_t5.model import T5, load

IDS, TARGET = mx.array([[5, 9, 40, 1]]), mx.array([[0, 7, 30]])
RAW = {"model_type": "t5", **SHAPE, **UNTIED, "d_ff": 64, "d_model": 64, "d_kv": 32}


def edited(source, folder, edit):
    """Copies a checkpoint with tensors changed by `edit(tensors)`; returns the new folder."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = edit(tensors) or tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mlx_folder(folder, model, raw, **entries):
    """Writes a model as convert.py and mlx-lm do; returns the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, **entries}))
    parameters = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), parameters, metadata={"format": "mlx"})
    return folder


@pytest.fixture
def plain():
    """Returns a small random T5 whose sizes can be quantized."""
    mx.random.seed(7)
    model = T5(T5Config.from_dict(RAW), separate_head=True)
    mx.eval(model.parameters())
    return model


def assert_same(model, other):
    """Asserts equal logits up to rounding, as a loaded model has joined some layers."""
    np.testing.assert_allclose(*(np.array(m(IDS, TARGET)) for m in (model, other)), atol=1e-5)


def without(name):
    return lambda tensors: tensors.pop(name) is None


def with_tensor(name, shape=(48, 32)):
    return lambda tensors: {**tensors, name: np.zeros(shape, np.float32)}


def without_decoder(tensors):
    return {name: a for name, a in tensors.items() if not name.startswith("decoder.")}


CROSS_O = "decoder.block.1.layer.1.EncDecAttention.o.weight"
BIAS = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
WO = "decoder.block.0.layer.2.DenseReluDense.wo.weight"
STRANGERS = (
    "encoder.block.0.layer.1.DenseReluDense.wi.weight",  # this model is gated
    "encoder.block.6.layer.0.SelfAttention.q.weight",  # the model has layers 0 to 5
    "decoder.block.2.layer.0.SelfAttention.q.weight",  # the model has layers 0 and 1
    BIAS.format(1),  # only umT5 has this bias
    "encoder.block.0.layer.0.SelfAttention.q.bias",
    "classifier.weight",
)


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        ("t5", without(CROSS_O), f"missing {CROSS_O}$"),
        ("umt5", without(BIAS.format(2)), f"missing {BIAS.format(2)}$"),
        ("flan", without("encoder.final_layer_norm.weight"), "missing encoder.final_layer_norm.w"),
        ("ul2", without("shared.weight"), "missing shared.weight$"),
        ("flan", without_decoder, r"missing decoder\..* and \d+ more"),
        *(("byt5", with_tensor(name), f"unexpected {name}$") for name in STRANGERS),
        ("t5", with_tensor(WO, (32, 47)), rf"{WO} has shape \(32, 47\) instead of \(32, 48\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(reference_of, tmp_path, family, edit, message):
    folder = edited(reference_of(family).folder, tmp_path / "m", edit)
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize("embedding", ["shared", "encoder.embed_tokens", "decoder.embed_tokens"])
def test_the_embedding_is_found_under_any_name(reference_of, tmp_path, embedding):
    def only(tensors):
        rest = {n: a for n, a in tensors.items() if "shared" not in n and "embed_tokens" not in n}
        return {**rest, f"{embedding}.weight": tensors["shared.weight"]}

    source = reference_of("t5").folder
    assert_same(load(edited(source, tmp_path / "m", only))[0], load(source)[0])


def test_a_head_that_differs_in_its_last_row_is_separate(reference_of, tmp_path):
    def nudge(tensors):
        tensors[HEAD][-1] += 1

    source = reference_of("t5").folder
    model, tied = load(edited(source, tmp_path / "m", nudge))[0], load(source)[0]
    assert "lm_head" in model and "lm_head" not in tied
    logits, expected = (np.array(m(IDS, TARGET)) for m in (model, tied))
    np.testing.assert_array_equal(logits[..., :-1], expected[..., :-1])
    assert np.abs(logits[..., -1] - expected[..., -1]).min() > 1e-3


@pytest.mark.parametrize("copied", ["encoder.embed_tokens", "decoder.embed_tokens"])
def test_embeddings_that_differ_are_refused(reference_of, tmp_path, copied):
    """transformers 5 keeps both; dropping one would change the text without a word."""

    def nudge(tensors):
        tensors[f"{copied}.weight"] = tensors["shared.weight"].copy()
        tensors[f"{copied}.weight"][-1, -1] += 1

    folder = edited(reference_of("t5").folder, tmp_path / "m", nudge)
    with pytest.raises(UserError, match=f"shared.weight and {copied}.weight differ"):
        load(folder)


ADDED = {
    "spiece_model": np.ones(9, np.uint8),
    "v_head.summary.weight": np.ones((1, 32), np.float32),
    "lm_head.bias": np.zeros(96, np.float32),
    "decoder.block.0.layer.0.layer_norm.bias": np.zeros(32, np.float32),
}


def test_what_other_tools_add_is_left_out_with_one_note(reference_of, tmp_path, capsys):
    source = reference_of("t5").folder
    folder = edited(source, tmp_path / "m", lambda tensors: {**tensors, **ADDED})
    assert_same(load(folder)[0], load(source)[0])
    note = capsys.readouterr().err
    assert note.count("\n") == 1 and all(name in note for name in ADDED)


@pytest.mark.parametrize("name", ["lm_head.bias", "encoder.final_layer_norm.bias"])
def test_a_bias_that_is_not_zero_is_refused(reference_of, tmp_path, name):
    bias = np.array([0, 0, 1e-3], np.float32)
    folder = edited(reference_of("t5").folder, tmp_path / "m", lambda t: {**t, name: bias})
    with pytest.raises(UserError, match=f"unexpected {name}"):
        load(folder)


@pytest.mark.parametrize("prefix", ["module.", "model.", "base.model."])
def test_a_prefix_of_all_names_is_named(reference_of, tmp_path, prefix):
    def prefixed(tensors):
        return {f"{prefix}{name}": array for name, array in tensors.items()}

    folder = edited(reference_of("t5").folder, tmp_path / "m", prefixed)
    with pytest.raises(UserError, match=f"names begin with '{prefix}'; save the state dict"):
        load(folder)


def test_weights_that_another_tool_quantized_are_refused_by_its_name(reference_of, tmp_path):
    folder = shutil.copytree(reference_of("t5").folder, tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 8}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="is quantized by gptq, which cannot be read here"):
        load(folder)


@pytest.mark.parametrize("kind", ["mlx", "hf"])
def test_integers_are_not_taken_for_weights(reference_of, tmp_path, plain, kind):
    """MLX reads 8-bit floats as uint8 without a word."""
    name = {"mlx": "encoder.layers.0.self_attention.q", "hf": CROSS_O.removesuffix(".weight")}[kind]
    folder = tmp_path / "m"
    if kind == "mlx":
        mlx_folder(folder, plain, RAW)
    else:
        shutil.copytree(reference_of("t5").folder, folder)
    file = str(folder / "model.safetensors")
    arrays, metadata = mx.load(file, return_metadata=True)
    arrays[f"{name}.weight"] = mx.zeros(arrays[f"{name}.weight"].shape, mx.uint8)
    mx.eval(arrays)
    mx.save_safetensors(file, arrays, metadata)
    with pytest.raises(UserError, match=f"{name}.weight is uint8 .as which MLX reads 8-bit floats"):
        load(folder)


@pytest.mark.parametrize("separate", [True, False])
def test_an_mlx_folder_is_loaded_strictly(tmp_path, separate):
    model = T5(T5Config.from_dict(RAW), separate)
    model.decoder.layers[0].cross_attention.extra = mx.zeros((2,))
    del model.encoder["norm"]
    with pytest.raises(UserError, match=r"encoder\.norm.*cross_attention\.extra"):
        load(mlx_folder(tmp_path / "m", model, RAW))


@pytest.mark.parametrize(
    "settings",
    [
        {"group_size": 64, "bits": 4},
        {"group_size": 32, "bits": 8, "mode": "affine"},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    ],
    ids=lambda settings: settings.get("mode", "") + str(settings["bits"]),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_quantized_folder_gives_the_quantized_model(tmp_path, plain, settings, dtype):
    """The loaded model equals the quantized model up to rounding, in every type."""
    skip_narrow_4_bits(settings["bits"], settings.get("mode", "affine"))
    nn.quantize(plain, **settings, class_predicate=quantize_predicate)
    folder = mlx_folder(tmp_path / "m", plain, RAW, quantization=settings)
    model = load(folder, dtype)[0]
    assert isinstance(model.decoder.layers[1].feed_forward.wo, nn.QuantizedLinear)
    logits = np.array(model(IDS, TARGET))
    expected = np.array(plain(IDS, TARGET))
    tolerance = {"float32": 1e-5, "bfloat16": 0.2, "float16": 0.02}[dtype]
    assert np.abs(logits - expected).max() <= tolerance * expected.std()


def test_single_layers_may_be_quantized_differently(tmp_path, plain):
    """mlx-lm writes the settings of a layer under its path."""
    special = "encoder.layers.0.feed_forward.wo"
    entry = {"group_size": 64, "bits": 4, special: {"group_size": 32, "bits": 8}}

    def settings(path, module):
        return quantize_predicate(path, module) and entry.get(path, True)

    nn.quantize(plain, 64, 4, class_predicate=settings)
    model = load(mlx_folder(tmp_path / "m", plain, RAW, quantization=entry))[0]
    assert model.encoder.layers[0].feed_forward.wo.bits == 8
    assert_same(model, plain)


@pytest.mark.parametrize("entry", [
    {"group_size": 64, "bits": 17}, {"group_size": "x", "bits": 4}, {"bits": 4, "mode": "none"},
    "4bit", [4], {"group_size": 64, "bits": 8}, {"group_size": 32, "bits": 4},
])  # fmt: skip
def test_senseless_quantization_is_refused(tmp_path, plain, entry):
    nn.quantize(plain, 64, 4, class_predicate=quantize_predicate)
    folder = mlx_folder(tmp_path / "m", plain, RAW, quantization=entry)
    with pytest.raises(UserError) as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", mx.bfloat16, None])
@pytest.mark.parametrize("stored", [mx.float32, mx.bfloat16])
def test_the_default_dtype_depends_on_the_device(tmp_path, monkeypatch, plain, stored, dtype):
    """The default is float32 without a GPU and the folder's type with a GPU."""
    plain.set_dtype(stored)
    folder = mlx_folder(tmp_path / "m", plain, RAW)
    for cpu in (True, False):
        monkeypatch.setattr(checkpoint, "on_cpu", lambda cpu=cpu: cpu)
        weights = dict(tree_flatten(load(folder, dtype)[0].parameters()))
        expected = (mx.float32 if cpu else stored) if dtype is None else dtype
        expected = getattr(mx, expected) if isinstance(expected, str) else expected
        for name, array in weights.items():
            assert array.dtype == (mx.float32 if keep_float32(name, expected) else expected), name
    assert keep_float32("encoder.layers.0.feed_forward.wo.weight", mx.float16)
    assert not keep_float32("encoder.layers.0.feed_forward.wo.weight", mx.bfloat16)
    assert not keep_float32("encoder.layers.0.self_attention.o.weight", mx.float16)
