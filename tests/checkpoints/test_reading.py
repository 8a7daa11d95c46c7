"""Tests reading.py: all formats give torch's tensors; damaged files give an error of one line."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints
from mlx_t5.backend import mx
from mlx_t5.checkpoints.reading import as_array, read_weights, require_float
from mlx_t5.disk import read_object
from mlx_t5.errors import UserError
from torch_views import views

EVERY_FORMAT = pytest.mark.parametrize("format", checkpoints.FORMATS)
BIN_FORMATS = pytest.mark.parametrize("format", ("zip", "legacy"))


def read_all(folder: Path) -> dict[str, mx.array]:
    return {name: as_array(tensor) for name, tensor in read_weights(folder)[0].items()}


def numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def refused(folder: Path, cause: str) -> None:
    with pytest.raises(UserError, match=cause) as error:
        mx.eval(read_all(folder))
    message = str(error.value)
    assert len(message) < 1000 and message.isprintable()


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", checkpoints.DTYPES)
@pytest.mark.parametrize("shards", (1, 3))
def test_files_written_by_torch_are_read(tmp_path, format, dtype, shards):
    state = views(dtype)
    weights, _ = read_weights(checkpoints.save(state, tmp_path, format, shards))
    assert sorted(weights) == sorted(state)
    for name, tensor in state.items():
        array = as_array(weights[name])
        assert weights[name].dtype == array.dtype == getattr(mx, dtype)
        assert weights[name].shape == array.shape == tuple(tensor.shape)
        assert weights[name].nbytes == array.nbytes
        np.testing.assert_array_equal(numbers(array), tensor.detach().float().numpy())


@BIN_FORMATS
@pytest.mark.parametrize("protocol", (2, 3, 4))
def test_every_pickle_protocol_is_read(tmp_path, format, protocol):
    path, zipped = tmp_path / "pytorch_model.bin", format == "zip"
    torch.save(views(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    for name, array in read_all(tmp_path).items():
        np.testing.assert_array_equal(numbers(array), views()[name].detach().numpy())


@BIN_FORMATS
def test_expanded_tensors_are_read(tmp_path, format):
    state = {"a": torch.arange(3.0).expand(4, 3)}
    array = read_all(checkpoints.save(state, tmp_path, format))["a"]
    np.testing.assert_array_equal(numbers(array), state["a"].numpy())


def test_safetensors_are_preferred(tmp_path):
    checkpoints.save({"a": torch.ones(2)}, tmp_path, "legacy")
    checkpoints.save({"a": torch.zeros(2)}, tmp_path, "safetensors", shards=2)
    assert numbers(read_all(tmp_path)["a"]).tolist() == [0, 0]


def test_links_to_files_without_a_suffix_are_read(tmp_path):
    """As in Hugging Face's cache."""
    checkpoints.save({"a": torch.ones(2)}, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert numbers(read_all(tmp_path)["a"]).tolist() == [1, 1]


def test_missing_shards_of_an_index_are_named(tmp_path):
    state = {name: torch.ones(2) for name in "abc"}
    checkpoints.save(state, tmp_path, "safetensors", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "are missing: model-00002-of-00003.safetensors; fetch them$")
    checkpoints.save(state, tmp_path, "legacy")  # as in flan-ul2: not chosen silently
    refused(tmp_path, "00002-of-00003.*delete the index to use the .bin")


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path):
    checkpoints.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, "zip", shards=2)
    index = tmp_path / "pytorch_model.bin.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["c"] = raw["weight_map"]["a"]
    index.write_text(json.dumps(raw))
    refused(tmp_path, "puts c into pytorch_model-00001-of-00002.bin, which lacks")


def test_the_index_decides_between_tensors_of_one_name(tmp_path):
    state = {"a": torch.zeros(2), "b": torch.ones(2)}
    checkpoints.save(state, tmp_path, "safetensors", shards=2)
    other = {"a": torch.full((2,), 7.0), "b": torch.ones(2)}
    checkpoints.write(other, tmp_path / "model-00002-of-00002.safetensors", "safetensors")
    assert numbers(read_all(tmp_path)["a"]).tolist() == [0, 0]


@pytest.mark.parametrize("file", ("../a.bin", "/etc/passwd", "..", "", 3))
def test_an_index_may_not_leave_its_folder(tmp_path, file):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    refused(tmp_path, r"index\.json.*not a file of its own folder")


@pytest.mark.parametrize("text", ("", "[]", "[" * 100_000, "\xff", None, "pipe"))
def test_a_file_without_a_json_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    if text == "pipe":
        os.mkfifo(path)
    elif text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="config.json"):
        read_object(path, "give a model folder")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "tf_model.h5").touch()
    os.mkfifo(tmp_path / "model.safetensors")  # reading it would wait for a writer
    refused(tmp_path, "no model.safetensors.*it holds model.safetensors, tf_model.h5")
    refused(tmp_path / "nowhere", "it holds nothing")


@pytest.mark.parametrize("file", ("model.safetensors", "pytorch_model.bin"))
def test_a_git_lfs_pointer_is_refused_with_the_cure(tmp_path, file):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / file).write_text(pointer)
    refused(tmp_path, "git lfs pull")


@EVERY_FORMAT
def test_unusable_types_are_refused_only_if_they_are_needed(tmp_path, format):
    state = {"a": torch.ones(2), "ids": torch.arange(4), "codes": torch.ones(2).to(torch.int8)}
    weights, _ = read_weights(checkpoints.save(state, tmp_path, format))
    require_float("a", weights["a"])
    assert numbers(as_array(weights["a"])).tolist() == [1, 1]
    with pytest.raises(UserError, match="ids is int64; weights must be float32, float16, bf"):
        require_float("ids", weights["ids"])


@EVERY_FORMAT
def test_a_file_cut_short_anywhere_is_refused(tmp_path, format):
    path = next(checkpoints.save(views(), tmp_path, format).iterdir())
    data = path.read_bytes()
    for length in range(0, len(data) - 1, max(1, len(data) // 150)):
        path.write_bytes(data[:length])
        refused(tmp_path, path.name)


@pytest.mark.slow
@EVERY_FORMAT
def test_flipped_bytes_give_an_error_or_other_numbers(tmp_path, format):
    path = next(checkpoints.save(views(), tmp_path, format).iterdir())
    data, chance, failures = path.read_bytes(), random.Random(0), 0
    for _ in range(400):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            broken[chance.randrange(len(data))] = chance.choice((0, 1, 40, 0x7F, 0x80, 0xFF))
        path.write_bytes(broken)
        try:
            mx.eval(read_all(tmp_path))
        except UserError:
            failures += 1
    assert failures > 50


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    (
        {"a": entry([2], 0, 12)},
        {"a": entry([2**31, 2**31], 0, 8)},
        {"a": entry([2], 0, 8, "F99")},
        {"a": entry([], 0, 0, "\x1b" * 9000)},
        {"a": 3},
        [],
    ),
)
def test_headers_that_lie_are_refused(tmp_path, header):
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path, "model.safetensors cannot be read")


# ---- pickles -------------------------------------------------------------------------------------


class Calls:
    """An object that is pickled as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@BIN_FORMATS
@pytest.mark.parametrize("protocol", (2, 4))
@pytest.mark.parametrize(
    ("function", "name"),
    (
        (os.system, "posix.system|nt.system"),
        (eval, "builtins.eval|__builtin__.eval"),
        (torch.storage._load_from_bytes, "torch.storage._load_from_bytes"),
    ),
)
def test_a_malicious_pickle_is_refused_by_name(tmp_path, format, protocol, function, name):
    trace, path = tmp_path / "executed", tmp_path / "pytorch_model.bin"
    argument = f"open({str(trace)!r}, 'w')" if function is eval else f"touch {trace}"
    state = {"a": torch.ones(2), "b": Calls(function, argument)}
    zipped = format == "zip"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    refused(tmp_path, rf"model.bin: refused: the pickle asks for ({name}),")
    assert not trace.exists()


def legacy(pickled: bytes, path: Path) -> Path:
    """Writes a legacy file whose object is the given pickle; returns its folder."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    body = b"".join(pickle.dumps(part, 2) for part in head)
    path.write_bytes(body + pickled + pickle.dumps([], 2))
    return path.parent


@pytest.mark.parametrize(
    ("pickled", "cause"),
    (
        (b"cos\nsystem\n(S'true'\ntR.", "asks for os.system"),
        (b"(S'true'\nios\nsystem\n.", "asks for os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x07\x1b[2Jsys\x93.", r"asks for os\.\\x1b\[2Jsys"),
        (b"\x80\x04\x8c\x0ctorch._utils\x8c\x14_rebuild_tensor_v2.x\x93.", "asks for torch._utils"),
        (b"\x80\x02\x82\x01.", "cannot be read"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "cannot be read"),
        # Attributes of what may be called stay as they are.
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\nN}X\1\0\0\0aK\1s\x86b.", "cannot be read"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "cannot be read"),
    ),
)
def test_hostile_opcodes_are_refused(tmp_path, pickled, cause):
    refused(legacy(pickled, tmp_path / "pytorch_model.bin"), cause)


@pytest.mark.parametrize(
    ("state", "cause"),
    (
        ([torch.ones(1)], "not a state dict but a list"),
        ({"a": 1}, "'a' is a int, not a tensor"),
        ({"state_dict": {"a": torch.ones(1)}, "step": 3}, "under 'state_dict'; save that dict"),
    ),
)
@BIN_FORMATS
def test_only_a_state_dict_is_accepted(tmp_path, format, state, cause):
    checkpoints.write(state, tmp_path / "pytorch_model.bin", format)
    refused(tmp_path, cause)


@pytest.mark.parametrize(
    ("old", "new"),
    (
        (b"K\x02K\x03\x86", b"K\x02K\x04\x86"),  # the shape (2, 3)
        (b"K\x03K\x01\x86", b"K\x05K\x01\x86"),  # the strides (3, 1)
        (b"QK\x00", b"QK\x01"),  # the offset, which follows the storage in the pickle
        (b"K\x06t", b"K\x07t"),  # the storage's size
    ),
)
@BIN_FORMATS
def test_a_tensor_reaching_out_of_its_storage_is_refused(tmp_path, format, old, new):
    path = checkpoints.save({"a": torch.ones(2, 3)}, tmp_path, format) / "pytorch_model.bin"
    data = path.read_bytes()
    if format == "legacy" and old == b"K\x06t":
        old, new = b"K\x06Nt", b"K\x07Nt"
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    refused(tmp_path, "reaches beyond its storage|is cut short|has another size|BadZipFile|CRC")


@pytest.mark.parametrize(
    ("change", "cause"),
    (
        ("compressed", "is compressed"),
        ("data/0", "the bytes of a are missing"),
        ("data.pkl", "cannot be read"),
        ("big", "is big-endian"),
        ("short", "storage 0 is cut short"),
    ),
)
def test_archives_that_torch_never_writes_are_refused(tmp_path, change, cause):
    path = checkpoints.save({"a": torch.ones(99)}, tmp_path, "zip") / "pytorch_model.bin"
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    how = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as new:
        for name, data in entries.items():
            if change == "big" and name.endswith("byteorder"):
                data = b"big"
            if change == "short" and name.endswith("data/0"):
                data = data[:-4]
            if not name.endswith(change):
                new.writestr(name, data)
    refused(tmp_path, cause)


VALUES = struct.pack("<6f", *[1.0] * 6)


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    (
        *((struct.pack("<q", 6) + VALUES, struct.pack("<q", n) + VALUES, "has another size")
          for n in (5, 2**62)),
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89", "is big-endian"),
    ),
)  # fmt: skip
def test_a_legacy_file_that_torch_never_writes_is_refused(tmp_path, old, new, cause):
    path = checkpoints.save({"a": torch.ones(6)}, tmp_path, "legacy") / "pytorch_model.bin"
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    refused(tmp_path, cause)
