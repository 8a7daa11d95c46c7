"""Tests safetensors_file.py: headers that lie are refused; written files are correct."""

from __future__ import annotations

import json
import struct

import pytest

from mlx_t5.backend import mx
from mlx_t5.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mlx_t5.checkpoints.safetensors_file import SafetensorsWriter
from mlx_t5.errors import UserError


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "cause"),
    (
        ({"a": entry([2], 0, 12)}, "does not fit its shape"),
        ({"a": entry([4], 0, 16)}, "bytes, but its header says"),
        ({"a": entry([-2], 8, 0)}, "no natural number"),
        ({"a": entry([True], 0, 4)}, "no natural number"),
        ({"a": entry([2], 0, 8, "F99")}, "unknown type F99"),
        ({"a": entry([2], -8, 0)}, "no natural number"),
        ({"a": entry([1], 4, 8)}, "overlaps another"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "b overlaps another"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "damaged safetensors header"),
        ({"a": entry([1] * 400_000, 0, 8)}, "8 dimensions"),
        ({"a": entry([10**4000] * 200, 0, 8)}, "dimensions"),
        ({"a": entry([2], 2**63, 2**63 + 8)}, "no natural"),
        ({f"{i}": {} for i in range(40_000)}, "more than 32768 tensors"),
        ({"__metadata__": {"a": " " * 5_000_000}}, "header is too large"),
        ({"\x1b[2J" + "a" * 1_000_000: {"dtype": 1}}, "damaged"),
        ({"a": entry([], 0, 0, "\x1b" * 9000)}, r"type \\x1b\\x1b"),
        ({"a": 3}, "damaged safetensors header"),
        ([], "damaged safetensors header"),
        ({"__metadata__": 3}, "damaged safetensors header"),
    ),
)
def test_headers_that_lie_are_refused(tmp_path, header, cause):
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=cause) as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("data", "cause"),
    (
        (b"", "not a whole"),
        (b"\x01", "not a whole"),
        (struct.pack("<Q", 2**63) + b"{}", "not a whole"),
        (struct.pack("<Q", 3) + b"{}", "not a whole"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "damaged"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "a name occurs twice"),
        (struct.pack("<Q", 4) + b'"\xff" ', "damaged"),
    ),
)
def test_broken_files_are_refused(tmp_path, data, cause):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=f"model.safetensors: .*{cause}"):
        open_checkpoint(tmp_path)


def test_written_files_are_read_back_unchanged(tmp_path):
    a, b = mx.random.normal((4, 6)).astype(mx.bfloat16), mx.arange(5, dtype=mx.uint32)
    tensors = {"a": ("bfloat16", (4, 6)), "b": ("uint32", (5,)), "e": ("float32", (0,))}
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, tensors, {"format": "mlx"}) as file:
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


def test_the_writer_refuses_too_little_or_too_much_data(tmp_path):
    tensors = {"a": ("float32", (2, 2))}
    with (
        pytest.raises(ValueError, match="incomplete tensors: a"),
        SafetensorsWriter(tmp_path / "short", tensors, {}) as file,
    ):
        file.append("a", mx.zeros((1, 2)))
    with (
        pytest.raises(ValueError, match="more data for a"),
        SafetensorsWriter(tmp_path / "long", tensors, {}) as file,
    ):
        file.append("a", mx.zeros((3, 2)))
