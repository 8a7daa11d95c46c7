"""The settings of sentence-transformers: how texts are read and vectors cut, and refusals."""

import numpy as np
import pytest
from tokenizers import normalizers

from convert import convert
from mlx_t5.checkpoints.sentence_modules import read_pooling
from mlx_t5.pooling import Pooling
from sentence_folders import (
    NORMALIZE,
    SETTINGS,
    by_sentence_transformers,
    change,
    dense,
    embedder,
    folder_of,
    pooling,
    refused,
)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("width", [3, 8, 1000])
def test_vectors_are_truncated_at_the_end(tmp_path, width, normalize):
    modules = [pooling("mean"), dense(32, 8), NORMALIZE]
    folder = folder_of(tmp_path / "m", *modules, general={"truncate_dim": width})
    whole = by_sentence_transformers(folder, ["ab"], normalize_embeddings=normalize)
    copied = convert(folder, tmp_path / "mlx", "float32", encoder_only=True)
    for decoder in embedder(folder), embedder(copied):
        np.testing.assert_allclose(decoder.embed(["ab"], normalize=normalize), whole, atol=2e-5)
        assert decoder.embed([]).shape == (0, min(width, 8))


def text_kwargs(common=None, **entries):
    return {"processing_kwargs": {"text": entries, "common": common}}


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, None),
        ({"reading": {"max_seq_length": 5}, "tokenizer": {"model_max_length": 3}}, 5),
        ({"reading": {"max_seq_length": None}, "tokenizer": {"model_max_length": 3}}, 3),
        ({"tokenizer": {"model_max_length": int(1e30)}}, None),
        ({"tokenizer": {"model_max_length": 7}, "model": {"max_position_embeddings": 4}}, 4),
        ({"model": {"max_position_embeddings": -1}}, None),
        ({"reading": {"max_seq_length": 6}, "model": {"max_position_embeddings": 4}}, 6),
        ({"reading": text_kwargs(max_length=4, padding="longest", pad_to_multiple_of=2)}, 4),
        ({"reading": text_kwargs(max_length=4, truncation=False)}, None),
        ({"reading": text_kwargs(max_length=None, truncation="only_first")}, None),
        ({"reading": {**text_kwargs(max_length=4), "max_seq_length": 3}}, 4),
        ({"reading": text_kwargs(max_length=4, common={"max_length": 6})}, 6),
        ({"reading": {"max_seq_length": 3, "processing_kwargs": {"text": {}, "image": {}}}}, 3),
    ],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_where_texts_are_cut(tmp_path, settings, limit, side):
    folder = folder_of(tmp_path / "m", pooling("mean"), **settings)
    change(folder / SETTINGS["tokenizer"], {"truncation_side": side})
    found = read_pooling(folder, 32)
    assert found.max_tokens == limit
    ids = [*range(10, 19), 1]
    first = ids if limit is None else [*ids[: limit - 1], 1]
    last = ids if limit is None else ids[-limit:]
    assert found.cut(ids) == (first if side == "right" else last)


def test_what_version_6_writes_changes_nothing(tmp_path):
    from sentence_transformers import SentenceTransformer

    folder, saved = folder_of(tmp_path / "m", pooling("mean")), tmp_path / "saved"
    SentenceTransformer(str(folder), device="cpu").save_pretrained(str(saved))
    assert read_pooling(saved, 32) == Pooling()
    change(saved / SETTINGS["reading"], {"unpad_inputs": False})
    change(saved / SETTINGS["general"], {"requirements": {"transformers": ">=5.15"}})
    assert read_pooling(saved, 32) == Pooling()


@pytest.mark.parametrize(
    "file, entries, message",
    [
        ("reading", {"max_seq_length": "many"}, "max_seq_length is 'many'; it must"),
        ("reading", {"do_lower_case": 1}, "do_lower_case is 1"),
        ("reading", {"tokenizer_args": {"a": 1}}, "tokenizer_args"),
        ("reading", {"query_length": 32}, "query_length 32"),
        ("reading", {"transformer_task": "fill-mask"}, "transformer_task"),
        ("reading", {"modality_config": {"message": {}}}, "modality_config"),
        ("reading", {"module_output_name": "scores"}, "module_output_name"),
        ("reading", {"processing_kwargs": [1]}, "processing_kwargs"),
        ("reading", {"processing_kwargs": {"chat_template": {"a": 1}}}, "chat_template"),
        ("reading", text_kwargs(truncation="only_second"), "truncation only_sec"),
        ("reading", text_kwargs(max_length=0), "max_length is 0; it must"),
        ("reading", text_kwargs(add_special_tokens=False), "add_special_tokens"),
        ("reading", {"processing_kwargs": {"common": {"stride": 2}}}, "stride 2"),
        ("general", {"truncate_dim": 0}, "truncate_dim is 0"),
        ("general", {"truncate_dim": True}, "truncate_dim is True"),
        ("general", {"default_prompt_name": "q"}, "no text for .* q$"),
        ("general", {"prompts": ["a"]}, "prompts"),
        ("general", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("general", {"an_entry_of_tomorrow": 0}, "an_entry_of_tomorrow"),
        ("tokenizer", {"truncation_side": "middle"}, "truncation_side middle"),
        ("tokenizer", {"model_max_length": 0}, "model_max_length is 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, file, entries, message):
    folder = folder_of(tmp_path / "m", pooling("mean"))
    change(folder / SETTINGS[file], entries)
    refused(folder, message)


@pytest.mark.parametrize(
    "general, prompt",
    [
        ({"default_prompt_name": "q", "prompts": {"q": "query: "}}, "query: "),
        ({"default_prompt_name": "document", "prompts": {"document": None}}, ""),
        ({"default_prompt_name": "query"}, ""),
        ({"prompts": {"query": "query: "}}, ""),
    ],
)
def test_a_default_prompt_is_put_in_front(tmp_path, general, prompt):
    folder = folder_of(tmp_path / "m", pooling("mean"))
    plain = embedder(folder).embed(f"{prompt}abc")
    change(folder / SETTINGS["general"], general)
    np.testing.assert_array_equal(plain, embedder(folder).embed("abc"))


def test_lower_case_is_that_of_tokenizers():
    text = "".join(map(chr, range(0x530))) + " ΟΔΥΣΣΕΥΣ "
    assert Pooling(lower_case=True).read(text) == normalizers.Lowercase().normalize_str(text)
