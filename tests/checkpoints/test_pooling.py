"""Tests folders of sentence-transformers: their vectors, and what is refused."""

import numpy as np
import pytest
import torch

from mlx_t5.checkpoints.pooling import Pooling, read_pooling
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.model import load
from sentence_folders import (  # fmt: skip
    NORMALIZE,
    SETTINGS,
    change,
    dense,
    folder_of,
    module,
    pooling,
)

TEXTS = ["ab", "abcdefgh", "", "c", " "]
PROMPTS = {"prompts": {"q": "query: ", "none": ""}}


def flags(*names):
    false_flags = {"pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}
    named = {f"pooling_mode_{name}": True for name in names}
    return module("Pooling", word_embedding_dimension=32, **false_flags, **named)


def embedder(folder):
    model, tokenizer = load(folder, "float32")
    return SpeculativeDecoder(model, None, tokenizer)


@pytest.mark.parametrize(
    "modules",
    [
        [pooling("mean")],
        [flags(), dense(32, 24, "Tanh")],
        [flags("mean_tokens"), dense(bias=False), NORMALIZE],  # as in sentence-t5 and gtr-t5
        [pooling(["mean"]), NORMALIZE],
    ],
)
@pytest.mark.parametrize("general", [{}, {**PROMPTS, "default_prompt_name": "q"}])
def test_vectors_are_those_of_sentence_transformers(tmp_path, modules, general):
    from sentence_transformers import SentenceTransformer

    settings = {"reading": {"max_seq_length": 12, "do_lower_case": False}, "general": general}
    folder = folder_of(tmp_path / "m", *modules, **settings)
    decoder = embedder(folder)
    vectors = decoder.embed(TEXTS)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=2e-5)
    assert decoder.embed([]).shape == (0, vectors.shape[1])
    out = convert(folder, tmp_path / "mlx", dtype="float32", encoder_only=True)
    np.testing.assert_array_equal(embedder(out).embed(TEXTS), vectors)


def test_folders_resaved_by_version_6_give_the_same_vectors(tmp_path):
    from sentence_transformers import SentenceTransformer

    folder, saved = folder_of(tmp_path / "m", pooling("mean"), dense(), NORMALIZE), tmp_path / "v6"
    SentenceTransformer(str(folder), device="cpu").save_pretrained(str(saved))
    np.testing.assert_allclose(embedder(saved).embed(TEXTS), embedder(folder).embed(TEXTS))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, None),
        ({"reading": {"max_seq_length": 5}, "tokenizer": {"model_max_length": 3}}, 5),
        ({"reading": {"max_seq_length": None}, "tokenizer": {"model_max_length": 3}}, 3),
        ({"tokenizer": {"model_max_length": int(1e30)}}, None),
    ],
)
def test_texts_are_cut_at_the_configured_length(tmp_path, settings, limit):
    pooler = read_pooling(folder_of(tmp_path / "m", pooling("mean"), **settings), 32)
    assert pooler == Pooling(max_tokens=limit)
    ids = [*range(10, 19), 1]
    assert pooler.cut(ids) == (ids if limit is None else [*ids[: limit - 1], 1])


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
_, GENERAL, _ = SETTINGS.values()


@pytest.mark.parametrize(
    ("modules", "file", "entries", "message"),
    [
        ([module("Router")], None, {}, "modules Transformer Router is not supported here; use sen"),
        ([dense(), pooling("mean")], None, {}, "modules Transformer Dense Pooling is not"),
        ([pooling("cls")], None, {}, "pooling_mode cls is not supported"),
        ([pooling("mean")], POOLING, {"include_prompt": False}, "include_prompt False is not"),
        ([pooling("mean"), dense(64, 8)], None, {}, "2_Dense does not fit the encoder"),
        ([pooling("mean"), dense()], DENSE, {"activation_function": "os.system"}, "system is not"),
        ([pooling("mean")], GENERAL, {"default_prompt_name": "q"}, "default_prompt_name q is not"),
    ],
)
def test_other_modules_and_settings_are_refused(tmp_path, modules, file, entries, message):
    folder = folder_of(tmp_path / "m", *modules)
    if file:
        change(folder / file, entries)
    with pytest.raises(UserError, match=message):
        read_pooling(folder, 32)


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"type": "a.Transformer", "path": "../x"}]'])
def test_a_damaged_list_of_modules_is_refused(tmp_path, content):
    folder = folder_of(tmp_path / "m", pooling("mean"))
    (folder / "modules.json").write_text(content)
    with pytest.raises(UserError, match=r"modules\.json"):
        read_pooling(folder, 32)


def test_a_pickle_that_is_not_a_tensor_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m", pooling("mean"), dense())
    torch.save({"linear.weight": print}, folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UserError, match="asks for builtins.print|asks for __builtin__.print"):
        read_pooling(folder, 32)
