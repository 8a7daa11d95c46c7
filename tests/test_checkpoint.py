"""checkpoint.py: every format gives the same tensors, and no file, however broken, does harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch

import checkpoints
from backend import UserError
from checkpoint import Checkpoint, open_checkpoint, read_weight_map
from safetensors_file import SafetensorsWriter

EVERY_FORMAT = pytest.mark.parametrize("format", checkpoints.FORMATS)
BIN_FORMATS = pytest.mark.parametrize("format", ("zip", "legacy"))


def views(dtype: str = "float32") -> OrderedDict[str, torch.Tensor]:
    """A state dict with all that makes reading hard: views, ties, a scalar, an empty tensor."""
    torch.manual_seed(0)
    base = torch.randn(6, 8).to(getattr(torch, dtype))
    state = OrderedDict(
        base=base,
        tied=base,
        transposed=base.T,
        inner=base[2:5, 1:7:2],
        cube=base.view(2, 3, 8).permute(2, 0, 1),
        tail=base.view(-1)[41:],
        scalar=base[3, 3],
        parameter=torch.nn.Parameter(torch.randn(5).to(base.dtype)),
        empty=base[:0],
    )
    state._metadata = OrderedDict({"": {"version": 1}})  # torch's own modules add this
    return state


def numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def read_all(folder: Path) -> dict[str, mx.array]:
    with open_checkpoint(folder) as checkpoint:
        return dict(checkpoint.items())


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", checkpoints.DTYPES)
@pytest.mark.parametrize("shards", (1, 3))
def test_reads_what_torch_wrote(tmp_path, format, dtype, shards):
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
            blocks = list(checkpoint.blocks(name, max_bytes))
            row = state[name][0].numel() * 4
            assert all(block.nbytes <= max(max_bytes, row) for block in blocks)
            np.testing.assert_array_equal(numbers(mx.concatenate(blocks)), state[name].numpy())


@BIN_FORMATS
def test_tied_tensors_share_a_storage(tmp_path, format):
    with open_checkpoint(checkpoints.save(views(), tmp_path, format)) as checkpoint:
        assert checkpoint.storage("base") == checkpoint.storage("tied")
        others = [checkpoint.storage(name) for name in checkpoint.names if name != "tied"]
        assert len(set(others)) == len(others)


@EVERY_FORMAT
def test_names_come_in_the_order_of_bytes(tmp_path, format):
    state = {name: torch.zeros(2) for name in "dacb"}
    with open_checkpoint(checkpoints.save(state, tmp_path, format, shards=2)) as checkpoint:
        places = [checkpoint.storage(name)[:2] for name in checkpoint.names]
        assert places == sorted(places)


@BIN_FORMATS
@pytest.mark.parametrize("protocol", (2, 3, 4))
def test_pickle_protocols(tmp_path, format, protocol):
    zipped = format == "zip"
    path = tmp_path / "pytorch_model.bin"
    torch.save(views(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert numbers(read_all(tmp_path)["base"]).shape == (6, 8)


def test_safetensors_wins(tmp_path):
    checkpoints.save({"a": torch.ones(2)}, tmp_path, "legacy")
    checkpoints.save({"a": torch.zeros(2)}, tmp_path, "safetensors", shards=2)
    assert numbers(read_all(tmp_path)["a"]).tolist() == [0, 0]


def test_index_with_missing_shards_names_them(tmp_path):
    state = {name: torch.ones(2) for name in "abc"}
    checkpoints.save(state, tmp_path, "safetensors", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="not there: model-00002-of-00003.safetensors; fetch them$"):
        open_checkpoint(tmp_path)
    checkpoints.save(state, tmp_path, "legacy")  # as flan-ul2 has it: still no silent choice
    with pytest.raises(UserError, match="00002-of-00003.*delete the index to use the .bin"):
        open_checkpoint(tmp_path)


def test_index_naming_a_tensor_that_no_shard_has(tmp_path):
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
def test_index_may_not_leave_its_folder(tmp_path, file):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match=r"index\.json.*no file of its own folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ("", "[]", "{}", '{"weight_map": 1}', "[" * 100_000, "\xff"))
def test_broken_index(tmp_path, text):
    (tmp_path / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="no index with a weight_map"):
        read_weight_map(tmp_path / "index.json")


def test_folder_without_weights(tmp_path):
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(UserError, match="no model.safetensors.*it holds tf_model.h5"):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match="empty or not there"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ("model.safetensors", "pytorch_model.bin"))
def test_git_lfs_pointer(tmp_path, file):
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


# Files that lie.


class Calls:
    """Pickles as a call of `function`."""

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
        (getattr, "builtins.getattr|__builtin__.getattr"),
        (torch.storage._load_from_bytes, "torch.storage._load_from_bytes"),
        (pickle.loads, "_?pickle.loads"),
    ),
)
def test_a_malicious_pickle_is_refused_by_name(tmp_path, format, protocol, function, name):
    trace = tmp_path / "executed"
    path = tmp_path / "pytorch_model.bin"
    argument = f"open({str(trace)!r}, 'w')" if function is eval else f"touch {trace}"
    state = {"a": torch.ones(2), "b": Calls(function, argument)}
    zipped = format == "zip"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=rf"model.bin: refused: the pickle asks for ({name}),"):
        open_checkpoint(tmp_path)
    assert not trace.exists()


def legacy(pickled: bytes, path: Path) -> Path:
    """A legacy file whose object is the given pickle."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    body = b"".join(pickle.dumps(part, 2) for part in head)
    path.write_bytes(body + pickled + pickle.dumps([], 2))
    return path.parent


@pytest.mark.parametrize(
    ("pickled", "cause"),
    (
        (b"cos\nsystem\n(S'true'\ntR.", "asks for os.system"),
        (b"(S'true'\nios\nsystem\n.", "refused: the pickle uses"),
        (b"\x80\x02(cos\nsystem\nX\x04\0\0\0trueo.", "asks for os.system"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "uses NEWOBJ"),
        (b"\x80\x02\x82\x01.", "uses EXT1"),
        (b"\x80\x02}X\x01\0\0\0a)R.", "no tensor constructor"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "no tensor constructor"),
        (b"\x80\x04\x8c\x02os\x8c\x07\x1b[2Jsys\x93.", r"asks for os\.\\x1b\[2Jsys"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "not a state dict but a list"),  # memo of 2**32 entries
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "not a whole"),  # a string of 2**63
        (b"\x80\x05\x96\0\0\0\0\x10\0\0\0.", "not a whole|refused"),  # 64 GB of bytes
        # A tuple of itself, doubled 60 times, as a key: hashing or printing it would never end.
        (b"\x80\x02})" + b"q\0h\0\x86" * 60 + b"K\x01s.", "tuple as a dictionary key"),
        (b"\x80\x02)" + b"q\0h\0\x86" * 60 + b"Q.", "not a whole|damaged"),
    ),
)
def test_hostile_opcodes(tmp_path, pickled, cause):
    with pytest.raises(UserError, match=cause):
        open_checkpoint(legacy(pickled, tmp_path / "pytorch_model.bin"))


@pytest.mark.parametrize("state", ([torch.ones(1)], {"a": 1}, {1: torch.ones(1)}, torch.ones(1)))
@BIN_FORMATS
def test_only_a_state_dict_will_do(tmp_path, format, state):
    checkpoints.write(state, tmp_path / "pytorch_model.bin", format)
    with pytest.raises(UserError, match="not a state dict"):
        open_checkpoint(tmp_path)


@BIN_FORMATS
def test_a_tensor_larger_than_its_storage(tmp_path, format):
    state = {"a": torch.ones(1).expand(2**40)}
    with pytest.raises(UserError, match="a reaches beyond its storage of 1 elements"):
        open_checkpoint(checkpoints.save(state, tmp_path, format))


def test_a_tensor_reaching_out_of_its_storage(tmp_path):
    path = checkpoints.save({"a": torch.ones(2, 3)}, tmp_path, "legacy") / "pytorch_model.bin"
    shape = b"K\x02K\x03\x86"  # (2, 3), then the strides (3, 1)
    assert path.read_bytes().count(shape) == 1
    path.write_bytes(path.read_bytes().replace(shape, b"K\x02K\x04\x86"))
    with pytest.raises(UserError, match="a reaches beyond its storage of 6"):
        open_checkpoint(tmp_path)


def test_compressed_archive(tmp_path):
    path = checkpoints.save({"a": torch.ones(99)}, tmp_path, "zip") / "pytorch_model.bin"
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in entries.items():
            new.writestr(name, data)
    with pytest.raises(UserError, match="compressed"):
        open_checkpoint(tmp_path)


def test_archive_without_a_storage(tmp_path):
    path = checkpoints.save({"a": torch.ones(99)}, tmp_path, "zip") / "pytorch_model.bin"
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in entries.items():
            if not name.endswith("data/0"):
                new.writestr(name, data)
    with pytest.raises(UserError, match=r"the bytes of a \(storage 0\) are missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "cause"),
    (
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}}, "not its shape's size"),
        (
            {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
            "bytes where its header says",
        ),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, "no natural number"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "no natural number"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, "unknown type F99"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "no natural number"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "overlaps another"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            },
            "b overlaps another",
        ),
        ({"a": {"dtype": "F32", "shape": [2]}}, "damaged safetensors header"),
        ({"a": 3}, "damaged safetensors header"),
        ([], "damaged safetensors header"),
        ({"__metadata__": 3}, "damaged safetensors header"),
    ),
)
def test_safetensors_headers_that_lie(tmp_path, header, cause):
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=cause):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "data",
    (
        b"",
        b"\x01",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 13) + b'{"a":1,"a":2}',
        struct.pack("<Q", 4) + b'"\xff" ',
    ),
)
def test_broken_safetensors(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="model.safetensors: (not a whole|damaged)"):
        open_checkpoint(tmp_path)


@EVERY_FORMAT
def test_a_file_cut_short_anywhere(tmp_path, format):
    whole = checkpoints.save(views(), tmp_path, format)
    path = next(path for path in whole.iterdir())
    data = path.read_bytes()
    for length in range(0, len(data) - 1, max(1, len(data) // 150)):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=path.name):
            open_checkpoint(tmp_path)


def test_a_file_cut_short_after_it_was_opened(tmp_path):
    path = checkpoints.save({"a": torch.ones(99)}, tmp_path) / "model.safetensors"
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(UserError, match="model.safetensors: the file ends inside a"):
            checkpoint.read("a")


@EVERY_FORMAT
def test_flipped_bytes_are_an_error_or_other_numbers(tmp_path, format):
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


# The writer.


def test_writer_round_trip(tmp_path):
    a, b = mx.random.normal((4, 6)).astype(mx.bfloat16), mx.arange(5, dtype=mx.uint32)
    wanted = {"a": ("bfloat16", (4, 6)), "b": ("uint32", (5,)), "e": ("float32", (0,))}
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, wanted, {"format": "mlx"}) as file:
        file.append("a", a[:3])
        file.append("b", b[:2])  # interleaved
        file.append("a", a[3:])
        file.append("b", b[2:])
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert mx.array_equal(arrays["a"], a) and mx.array_equal(arrays["b"], b)
    assert arrays["e"].shape == (0,)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, Checkpoint) and checkpoint.metadata == {"format": "mlx"}


def test_writer_insists_on_the_promised_sizes(tmp_path):
    wanted = {"a": ("float32", (2, 2))}
    with (
        pytest.raises(ValueError, match="incomplete tensors: a"),
        SafetensorsWriter(tmp_path / "short", wanted, {}) as file,
    ):
        file.append("a", mx.zeros((1, 2)))
    with (
        pytest.raises(ValueError, match="more data for a"),
        SafetensorsWriter(tmp_path / "long", wanted, {}) as file,
    ):
        file.append("a", mx.zeros((3, 2)))


def test_stream_position_after_pickles(tmp_path):
    """torch reads legacy files from a stream; so the storages must lie where we think they do."""
    path = checkpoints.save(views(), tmp_path, "legacy") / "pytorch_model.bin"
    with open_checkpoint(tmp_path) as checkpoint:
        nbytes = sum({checkpoint.storage(n)[1]: checkpoint.nbytes(n) for n in ("base",)}.values())
        offset = checkpoint.storage("base")[1]
    raw = path.read_bytes()[offset : offset + nbytes]
    assert raw == views()["base"].numpy().tobytes()
    assert torch.load(io.BytesIO(path.read_bytes()))["base"].shape == (6, 8)
