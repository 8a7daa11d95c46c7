"""Checkpoints written by torch are read; other pickled calls are never executed."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints
from mlx_t5.checkpoints.checkpoint import open_checkpoint
from mlx_t5.errors import UserError
from torch_views import views

BIN_FORMATS = pytest.mark.parametrize("format", ("zip", "legacy"))


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
    """Writes a legacy file whose object is the given pickle; returns its folder."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    body = b"".join(pickle.dumps(part, 2) for part in head)
    path.write_bytes(body + pickled + pickle.dumps([], 2))
    return path.parent


LONG = b"\x8b" + struct.pack("<i", 200_000) + b"\1" * 200_000
TEXT = b"X" + struct.pack("<i", 200_000) + b"a" * 200_000
CALL = b"\x80\x02ctorch._utils\n_rebuild_parameter\n"
REBUILD = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0aNK\1tQ"
ONES = b"K\1" * 100_000 + b"t"


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
        (b"\x80\x02" + b"}" * 1_000_000 + b".", "more than 262144 opcodes"),
        # Keys that are hashed or compared 50,000 times, at 200 kB each time.
        (b"\x80\x02}" + LONG + b"q\0Ns" + b"h\0Ns" * 50_000 + b".", "longer than any name"),
        (b"\x80\x02}" + TEXT + b"q\0Ns" + TEXT + b"q\1Ns" + b"h\1Ns" * 50_000 + b".", "any name"),
        # A call with 100,000 arguments, and a shape of 100,000 numbers.
        (CALL + b"(" + b"N" * 100_000 + b"tq\0R0h\0R.", "too many arguments"),
        (REBUILD + b"(" + STORAGE + b"K\0(" + ONES + b"(" + ONES + b"tR.", "8 dimensions"),
    ),
)
def test_hostile_opcodes_are_refused(tmp_path, pickled, cause):
    with pytest.raises(UserError, match=cause):
        open_checkpoint(legacy(pickled, tmp_path / "pytorch_model.bin"))


def test_a_list_of_storages_that_hashes_for_ever_is_refused(tmp_path):
    parts = (pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {}, {}))
    nested = b"\x80\x02](" + b")" + b"q\0h\0\x86" * 60 + b"e."
    (tmp_path / "pytorch_model.bin").write_bytes(b"".join(parts) + nested)
    with pytest.raises(UserError, match="list of storages names one that no tensor has"):
        open_checkpoint(tmp_path)


def test_an_archive_with_too_many_entries_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        for i in range(100):
            archive.writestr(f"{i:030000}", b"")
    with pytest.raises(UserError, match="list of entries is too large"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("state", ([torch.ones(1)], {"a": 1}, {1: torch.ones(1)}, torch.ones(1)))
@BIN_FORMATS
def test_only_a_state_dict_is_accepted(tmp_path, format, state):
    checkpoints.write(state, tmp_path / "pytorch_model.bin", format)
    with pytest.raises(UserError, match="not a state dict"):
        open_checkpoint(tmp_path)


@BIN_FORMATS
def test_a_tensor_larger_than_its_storage_is_refused(tmp_path, format):
    state = {"a": torch.ones(1).expand(2**40)}
    with pytest.raises(UserError, match="a reaches beyond its storage of 1 elements"):
        open_checkpoint(checkpoints.save(state, tmp_path, format))


@pytest.mark.parametrize(
    ("old", "new"),
    (
        (b"K\x02K\x03\x86", b"K\x02K\x04\x86"),  # the shape (2, 3)
        (b"K\x03K\x01\x86", b"K\x05K\x01\x86"),  # the strides (3, 1)
        (b"QK\x00", b"QK\x01"),  # the offset, which follows the storage in the pickle
    ),
)
def test_a_tensor_reaching_out_of_its_storage_is_refused(tmp_path, old, new):
    path = checkpoints.save({"a": torch.ones(2, 3)}, tmp_path, "legacy") / "pytorch_model.bin"
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    with pytest.raises(UserError, match="a reaches beyond its storage of 6"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("compression", "left_out", "cause"),
    (
        (zipfile.ZIP_DEFLATED, "nothing", "compressed"),
        (zipfile.ZIP_STORED, "data/0", r"the bytes of a \(storage 0\) are missing"),
    ),
)
def test_archives_that_torch_never_writes_are_refused(tmp_path, compression, left_out, cause):
    path = checkpoints.save({"a": torch.ones(99)}, tmp_path, "zip") / "pytorch_model.bin"
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in entries.items():
            if not name.endswith(left_out):
                new.writestr(name, data)
    with pytest.raises(UserError, match=cause):
        open_checkpoint(tmp_path)


@BIN_FORMATS
@pytest.mark.parametrize("protocol", (2, 3, 4))
def test_every_pickle_protocol_is_read(tmp_path, format, protocol):
    zipped = format == "zip"
    path = tmp_path / "pytorch_model.bin"
    torch.save(views(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, tensor in views().items():
            assert np.array_equal(np.array(checkpoint.read(name)), tensor.detach().numpy())


@pytest.mark.parametrize("count", (5, 7, 2**62))
def test_a_legacy_storage_of_another_size_is_refused(tmp_path, count):
    path = checkpoints.save({"a": torch.ones(6)}, tmp_path, "legacy") / "pytorch_model.bin"
    data = path.read_bytes()
    values = struct.pack("<6f", *[1.0] * 6)
    path.write_bytes(data.replace(struct.pack("<q", 6) + values, struct.pack("<q", count) + values))
    with pytest.raises(UserError, match="storage .* is cut short or has another size"):
        open_checkpoint(tmp_path)


def test_an_archive_entry_that_ends_after_the_file_is_refused(tmp_path):
    path = checkpoints.save({"a": torch.ones(6)}, tmp_path, "zip") / "pytorch_model.bin"
    data = bytearray(path.read_bytes())
    header = data.index(b"PK\x01\x02")
    while not data[header + 46 :].startswith(b"pytorch_model/data/0"):
        header = data.index(b"PK\x01\x02", header + 1)
    data[header + 20 : header + 28] = struct.pack("<II", 2**30, 2**30)  # both sizes of the entry
    path.write_bytes(data)
    with pytest.raises(UserError, match="data/0 lies beyond the end of the file"):
        open_checkpoint(tmp_path)
