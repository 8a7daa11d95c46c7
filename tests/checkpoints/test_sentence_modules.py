"""The modules of sentence-transformers: what they make of states, and what is refused."""

import json

import numpy as np
import pytest

from convert import convert
from families import torch
from mlx_t5.backend import mx
from mlx_t5.checkpoints.sentence_modules import read_pooling
from mlx_t5.errors import UserError
from mlx_t5.pooling import ACTIVATIONS, MODES
from sentence_folders import (
    NORMALIZE,
    OF_TOKENS,
    by_sentence_transformers,
    change,
    dense,
    embedder,
    flags,
    folder_of,
    module,
    pooling,
    refused,
)

TEXTS = ["ab", "abcdefgh", "c"]


@pytest.mark.parametrize(
    "modules",
    [
        *([pooling(mode)] for mode in MODES),
        [flags("cls_token", "mean_tokens", "lasttoken"), dense(96, 24, "Tanh"), NORMALIZE],
        [flags()],
        [pooling("mean", "cls"), dense(64, 8)],  # in the file's order, and as often as there
        [pooling("lasttoken", "max", "lasttoken")],
        [pooling("mean"), dense(activation="ReLU", use_residual=True)],
        [pooling("mean"), dense(32, 8, "GELU", use_residual=True, bias=False), NORMALIZE],
        [dense(32, 16, **OF_TOKENS), module("Normalize", **OF_TOKENS), pooling("max", "mean")],
        [pooling("mean"), dense(32, 8, "SiLU", module_output_name="sentence_embedding")],
    ],
)
def test_vectors_are_those_of_sentence_transformers(tmp_path, modules):
    folder = folder_of(tmp_path / "m", *modules, reading={"max_seq_length": 5})
    decoder = embedder(folder)
    found = decoder.embed(TEXTS)
    np.testing.assert_allclose(found, by_sentence_transformers(folder, TEXTS), atol=2e-5)
    assert decoder.embed([]).shape == (0, found.shape[1])


def test_modules_go_with_a_conversion(tmp_path):
    modules = [dense(**OF_TOKENS), pooling("mean", "cls"), dense(64, 8, use_residual=True)]
    folder = folder_of(tmp_path / "m", *modules, NORMALIZE, reading={"do_lower_case": True})
    whole = embedder(folder)
    out = convert(folder, tmp_path / "mlx", dtype="float32", encoder_only=True)
    np.testing.assert_array_equal(embedder(out).embed(["Ab", "ab"]), whole.embed(["ab", "Ab"]))
    assert not list(out.rglob("*.bin")), "safetensors alone"
    again = convert(folder, out, overwrite=True, quantize=True, q_group_size=32)
    assert (again / "3_Dense" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "modules, message",
    [
        ([module("Router")], "module Router is not supported; known: Pooling, Dense, "),
        ([module("evil.Pooling")], "module evil.Pooling is not supported"),
        ([], "no Pooling module"),
        ([dense()], "module_input_name sentence_embedding is not supported"),
    ],
)
def test_modules_that_are_not_supported_are_refused(tmp_path, modules, message):
    refused(folder_of(tmp_path / "m", *modules), message)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("modules.json", "{}", "no list of modules"),
        ("modules.json", "[1]", "no list of modules"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../x"}]', "no folder of its own"),
        ("modules.json", '[{"type": "a.Pooling", "path": "/etc"}]', "no folder of its own"),
        ("modules.json", "[]", "the first module must be the folder's Transformer"),
        ("modules.json", '[{"type": "a.Pooling", "path": ""}]', "the first module must be"),
        ("modules.json", json.dumps([{"type": "a", "path": "", "name": "b"}] * 2), "have one name"),
        ("1_Pooling/config.json", "{}", "has no embedding_dimension"),
        ("1_Pooling/config.json", "no", "no valid JSON"),
        ("2_Dense/config.json", "{}", "out_features is None; it must be a whole number from 1"),
        ("2_Dense/config.json", '{"out_features": 8}', "its tensors are not"),
        ("sentence_bert_config.json", "[]", "holds no object"),
        ("1_Pooling/config.json", {"pooling_mode": "best"}, "pooling mode best; known: cls"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "pooling mode a list of 0"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls"] * 17}, "a list of 17"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt False"),
        ("1_Pooling/config.json", {"weights": 1}, "weights 1 is not supported here"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "os.system is not known"),
        ("2_Dense/config.json", {"activation_function": "evil.Tanh"}, "evil.Tanh is not known"),
        ("2_Dense/config.json", {"out_features": 99999999}, "out_features is 99999999"),
        ("2_Dense/config.json", {"in_features": 8}, "in_features 8 must be 32"),
        ("2_Dense/config.json", {"use_residual": 1}, "use_residual is 1; it must be True or False"),
        ("2_Dense/config.json", {"module_output_name": "aside"}, "module_output_name aside is not"),
        ("2_Dense/config.json", {"module_input_name": "aside"}, "module_input_name aside"),
        ("2_Dense/config.json", {**OF_TOKENS, "module_output_name": "sentence_embedding"}, "not s"),
        ("2_Dense/config.json", {"init_weight": [1]}, "init_weight .* is not supported"),
        ("3_Normalize/config.json", {"module_input_name": "aside"}, "module_input_name aside"),
        ("3_Normalize/config.json", {"p": 1}, "'?p'? 1 is not supported"),
    ],
)
def test_what_is_damaged_or_not_supported_is_refused_by_name(tmp_path, file, content, message):
    """Content takes a file's place; entries are added to it."""
    folder = folder_of(tmp_path / "m", pooling("mean"), dense(), NORMALIZE)
    if isinstance(content, str):
        (folder / file).write_text(content)
    else:
        change(folder / file, content)
    refused(folder, message)


def test_a_pickle_that_is_no_tensor_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m", pooling("mean"), dense())
    torch.save({"linear.weight": print}, folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UserError):
        read_pooling(folder, 32)


def test_activations_are_those_of_torch():
    x = np.linspace(-4, 4, 101, dtype=np.float32)
    for name, act in ACTIVATIONS.items():
        theirs = getattr(torch.nn, name)()(torch.tensor(x)).numpy()
        np.testing.assert_allclose(np.array(act(mx.array(x))), theirs, atol=1e-6)
