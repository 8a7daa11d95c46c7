"""Tests checkpoint.py: all formats give the same tensors, and broken files do no harm."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints
from mlx_t5.backend import mx
from mlx_t5.checkpoints.checkpoint import open_checkpoint, read_weight_map
from mlx_t5.errors import UserError
from torch_views import views

EVERY_FORMAT = pytest.mark.parametrize("format", checkpoints.FORMATS)


def numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def read_all(folder: Path) -> dict[str, mx.array]:
    with open_checkpoint(folder) as checkpoint:
        return dict(checkpoint.items())


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", checkpoints.DTYPES)
@pytest.mark.parametrize("shards", (1, 3))
def test_files_written_by_torch_are_read(tmp_path, format, dtype, shards):
    state = views(dtype)
    with open_checkpoint(checkpoints.save(state, tmp_path, format, shards)) as checkpoint:
        assert sorted(checkpoint.names) == sorted(state)
        assert [name for name, _ in checkpoint.items()] == checkpoint.names
        for name, tensor in state.items():
            array = checkpoint.read(name)
            assert checkpoint.dtype(name) == dtype and array.dtype == getattr(mx, dtype)
            assert checkpoint.shape(name) == array.shape == tuple(tensor.shape)
            assert checkpoint.nbytes(name) == array.nbytes
            np.testing.assert_array_equal(numbers(array), tensor.detach().float().numpy())


@EVERY_FORMAT
@pytest.mark.parametrize("max_bytes", (1, 40, 100, 10_000))
def test_blocks_are_the_rows_in_order(tmp_path, format, max_bytes):
    state = views()
    with open_checkpoint(checkpoints.save(state, tmp_path, format)) as checkpoint:
        for name in ("base", "transposed", "inner", "cube", "tail"):
            tiles = list(checkpoint.row_tiles(name, max_bytes))
            row = state[name][0].numel() * 4
            assert all(tile.nbytes <= max(max_bytes, row) for tile in tiles)
            np.testing.assert_array_equal(numbers(mx.concatenate(tiles)), state[name].numpy())


def test_safetensors_are_preferred(tmp_path):
    checkpoints.save({"a": torch.ones(2)}, tmp_path, "legacy")
    checkpoints.save({"a": torch.zeros(2)}, tmp_path, "safetensors", shards=2)
    assert numbers(read_all(tmp_path)["a"]).tolist() == [0, 0]


def test_missing_shards_of_an_index_are_named(tmp_path):
    state = {name: torch.ones(2) for name in "abc"}
    checkpoints.save(state, tmp_path, "safetensors", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        UserError, match="are missing: model-00002-of-00003.safetensors; fetch them$"
    ):
        open_checkpoint(tmp_path)
    checkpoints.save(state, tmp_path, "legacy")  # as in flan-ul2: not chosen silently
    with pytest.raises(UserError, match="00002-of-00003.*delete the index to use the .bin"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path):
    checkpoints.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, "zip", shards=2)
    index = tmp_path / "pytorch_model.bin.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["c"] = raw["weight_map"]["a"]
    index.write_text(json.dumps(raw))
    with pytest.raises(
        UserError, match="puts c into pytorch_model-00001-of-00002.bin, which lacks"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ("../a.bin", "/etc/passwd", "x/y.bin", "..", "", "a\\b", 3, "a\0"))
def test_an_index_may_not_leave_its_folder(tmp_path, file):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match=r"index\.json.*no file of its own folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ("", "[]", "{}", '{"weight_map": 1}', "[" * 100_000, "\xff"))
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        UserError, match="index.json (is no valid JSON|holds no object|has no weight_map)"
    ):
        read_weight_map(tmp_path / "index.json")


def test_a_huge_index_is_refused_in_a_short_line(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"{i}": f"{i}" for i in range(2000)}}))
    with pytest.raises(UserError, match="names 2000 files; at most 1000 are read"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {f"{i}": f"\x1b{i:0200}" for i in range(900)}}))
    with pytest.raises(UserError, match="and 897 more; fetch them") as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


def test_too_many_tensors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_t5.checkpoints.checkpoint.MAX_TENSORS", 3)
    state = {name: torch.zeros(1) for name in "abcd"}
    with pytest.raises(UserError, match="more than 3 tensors; that is no T5"):
        open_checkpoint(checkpoints.save(state, tmp_path, shards=2))


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(UserError, match="no model.safetensors.*it holds tf_model.h5"):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match="empty or missing"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ("model.safetensors", "pytorch_model.bin"))
def test_a_git_lfs_pointer_is_refused_with_the_cure(tmp_path, file):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / file).write_text(pointer)
    with pytest.raises(UserError, match="git lfs pull"):
        open_checkpoint(tmp_path)


@EVERY_FORMAT
def test_other_types_are_refused_by_name(tmp_path, format):
    state = {"a": torch.ones(2), "ids": torch.arange(4), "wide": torch.ones(2).double()}
    with open_checkpoint(checkpoints.save(state, tmp_path, format)) as checkpoint:
        assert (checkpoint.dtype("ids"), checkpoint.dtype("wide")) == ("int64", "float64")
        assert numbers(checkpoint.read("a")).tolist() == [1, 1]
        with pytest.raises(UserError, match="ids is int64; only float32, float16, bfloat16"):
            checkpoint.read("ids")


@EVERY_FORMAT
def test_a_file_cut_short_anywhere_is_refused(tmp_path, format):
    whole = checkpoints.save(views(), tmp_path, format)
    path = next(path for path in whole.iterdir())
    data = path.read_bytes()
    for length in range(0, len(data) - 1, max(1, len(data) // 150)):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=path.name):
            open_checkpoint(tmp_path)


@pytest.mark.slow
@EVERY_FORMAT
def test_flipped_bytes_give_an_error_or_other_numbers(tmp_path, format):
    path = next(checkpoints.save(views(), tmp_path, format).iterdir())
    data = path.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(400):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            broken[chance.randrange(len(data))] = chance.choice((0, 1, 40, 0x7F, 0x80, 0xFF))
        path.write_bytes(broken)
        try:
            read_all(tmp_path)
        except UserError:
            refused += 1
    assert refused > 50
