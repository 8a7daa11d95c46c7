"""Tests folders of sentence-transformers: their vectors, and what is refused."""

import numpy as np
import pytest
import torch

from convert import convert
from decoder import SpeculativeDecoder
from mlx_t5.checkpoints.pooling import Pooling
from mlx_t5.checkpoints.sentence_modules import read_pooling
from mlx_t5.errors import UserError
from model import load
from sentence_folders import (  # fmt: skip
    NORMALIZE,
    SETTINGS,
    change,
    dense,
    folder_of,
    module,
    pooling,
)

TEXTS = ["ab", "abcdefgh", "c"]
PROMPTS = {"prompts": {"q": "query: ", "none": ""}}


def flags(*names):
    false_flags = {"pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}
    named = {f"pooling_mode_{name}": True for name in names}
    return module("Pooling", word_embedding_dimension=32, **false_flags, **named)


def embedder(folder):
    model, tokenizer = load(folder, "float32")
    return SpeculativeDecoder(model, None, tokenizer)


def by_sentence_transformers(folder, texts):
    """Returns the library's vectors of texts in one batch."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts)


@pytest.mark.parametrize(
    "modules",
    [
        *([pooling(mode)] for mode in ("mean", "cls", "lasttoken")),
        *([flags(*names)] for names in ((), ["cls_token"], ["lasttoken"])),
        [flags("mean_tokens"), dense(bias=False), NORMALIZE],  # as in sentence-t5
        [pooling(["mean"]), dense(32, 24, "Tanh"), dense(24, 8, "GELU"), dense(8, 8, "ReLU")],
    ],
)
@pytest.mark.parametrize("general", [{}, {**PROMPTS, "default_prompt_name": "q"}])
def test_vectors_are_those_of_sentence_transformers(tmp_path, modules, general):
    settings = {"reading": {"max_seq_length": 12, "do_lower_case": False}, "general": general}
    folder = folder_of(tmp_path / "m", *modules, **settings)
    decoder = embedder(folder)
    vectors = decoder.embed(TEXTS)
    np.testing.assert_allclose(vectors, by_sentence_transformers(folder, TEXTS), atol=2e-5)
    assert decoder.embed([]).shape == (0, vectors.shape[1])


def test_a_conversion_keeps_the_modules(tmp_path):
    modules = [pooling("cls"), dense(32, 64), NORMALIZE]
    folder = folder_of(tmp_path / "m", *modules, reading={"max_seq_length": 5})
    out = convert(folder, tmp_path / "mlx", dtype="float32", encoder_only=True)
    np.testing.assert_array_equal(embedder(out).embed(TEXTS), embedder(folder).embed(TEXTS))
    assert not list(out.rglob("*.bin")), "safetensors alone"
    again = convert(folder, out, overwrite=True, quantize=True, q_group_size=32)
    assert (again / "2_Dense" / "model.safetensors").exists()


def test_folders_resaved_by_version_6_give_the_same_vectors(tmp_path):
    from sentence_transformers import SentenceTransformer

    folder, saved = folder_of(tmp_path / "m", pooling("mean"), dense(), NORMALIZE), tmp_path / "v6"
    SentenceTransformer(str(folder), device="cpu").save_pretrained(str(saved))
    change(saved / SETTINGS["reading"], {"unpad_inputs": False})
    change(saved / SETTINGS["general"], {"requirements": {"transformers": ">=5.15"}})
    np.testing.assert_allclose(embedder(saved).embed(TEXTS), embedder(folder).embed(TEXTS))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, None),
        ({"reading": {"max_seq_length": 5}, "tokenizer": {"model_max_length": 3}}, 5),
        ({"reading": {"max_seq_length": None}, "tokenizer": {"model_max_length": 3}}, 3),
        ({"tokenizer": {"model_max_length": int(1e30), "truncation_side": "right"}}, None),
    ],
)
def test_texts_are_cut_at_the_configured_length(tmp_path, settings, limit):
    pooler = read_pooling(folder_of(tmp_path / "m", pooling("mean"), **settings), 32)
    assert pooler == Pooling(max_tokens=limit)
    ids = [*range(10, 19), 1]
    assert pooler.cut(ids) == (ids if limit is None else [*ids[: limit - 1], 1])


POOLING, DENSE, NORM = "1_Pooling/config.json", "2_Dense/config.json", "3_Normalize/config.json"
READING, GENERAL, TOKENIZER = SETTINGS.values()


def refused(folder, message):
    with pytest.raises(UserError, match=message) as error:
        read_pooling(folder, 32)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "file, entries",
    [
        (POOLING, {"pooling_mode": "max"}),
        (POOLING, {"pooling_mode": "weightedmean"}),
        (POOLING, {"pooling_mode": ["mean", "cls"]}),
        (POOLING, {"pooling_mode_mean_sqrt_len_tokens": True}),
        (POOLING, {"include_prompt": False}),
        (DENSE, {"use_residual": True}),
        (DENSE, {"activation_function": "os.system"}),
        (DENSE, {"activation_function": "evil.Tanh"}),
        (DENSE, {"module_input_name": "token_embeddings"}),
        (DENSE, {"module_output_name": "aside"}),
        (NORM, {"module_input_name": "token_embeddings"}),
        (NORM, {"p": 1}),
        (READING, {"do_lower_case": True}),
        (READING, {"tokenizer_args": {"a": 1}}),
        (READING, {"transformer_task": "fill-mask"}),
        (READING, {"modality_config": {"message": {}}}),
        (READING, {"module_output_name": "scores"}),
        (READING, {"processing_kwargs": {"text": {"max_length": 4}}}),
        (GENERAL, {"truncate_dim": 8}),
        (GENERAL, {"model_type": "SparseEncoder"}),
        (GENERAL, {"an_entry_of_tomorrow": 1}),
        (TOKENIZER, {"truncation_side": "left"}),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, file, entries):
    folder = folder_of(tmp_path / "m", pooling("mean"), dense(), NORMALIZE)
    change(folder / file, entries)
    assert refused(folder, next(iter(entries))).endswith("use sentence-transformers")


@pytest.mark.parametrize(
    "modules, message",
    [
        ([module("Router")], "module 1 Router is not supported here; use sentence-transformers$"),
        ([module("evil.Pooling")], "module 1 evil.Pooling is not supported"),
        ([dense(), pooling("mean")], "module 1 Dense is not supported"),
        ([pooling("mean"), pooling("cls")], "module 2 Pooling is not supported"),
        ([pooling("mean"), dense(64, 8)], "its tensors are not"),
        ([], "no Pooling module"),
    ],
)
def test_unsupported_modules_are_refused(tmp_path, modules, message):
    refused(folder_of(tmp_path / "m", *modules), message)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("modules.json", "{}", "no list of modules"),
        ("modules.json", "[1]", "no list of modules"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../x"}]', "no folder of its own"),
        ("modules.json", '[{"type": "a.Pooling", "path": "/etc"}]', "no folder of its own"),
        ("modules.json", '[{"type": "a.Pooling", "path": ""}]', "module 0 a.Pooling is not"),
        ("modules.json", "[]", "has no Pooling module"),
        (POOLING, "{}", "has no pooling mode"),
        (POOLING, "no", "no valid JSON"),
        (DENSE, "{}", "out_features is None; it must be a whole number from 1"),
        (DENSE, '{"out_features": 99999999}', "out_features is 99999999"),
        (DENSE, '{"out_features": 8}', "its tensors are not"),
        (READING, "[]", "holds no object"),
        (READING, '{"max_seq_length": "many"}', "max_seq_length is 'many'; it must"),
        (TOKENIZER, '{"model_max_length": 0}', "model_max_length is 0"),
        (GENERAL, '{"default_prompt_name": "q"}', "no text for default_prompt_name q$"),
    ],
)
def test_damaged_files_are_refused(tmp_path, file, content, message):
    folder = folder_of(tmp_path / "m", pooling("mean"), dense())
    (folder / file).write_text(content)
    refused(folder, message)


def test_a_pickle_that_is_no_tensor_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m", pooling("mean"), dense())
    torch.save({"linear.weight": print}, folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UserError):
        read_pooling(folder, 32)
