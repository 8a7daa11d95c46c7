"""The safetensors container: a reader that checks the header, and a writer that streams.

A file has the header's length in 8 little-endian bytes, then a JSON header
`{name: {dtype, shape, data_offsets}}` with an optional `__metadata__`, then the tensors' bytes
without gaps (https://github.com/huggingface/safetensors#format). The header needs only the types
and shapes, which are known before the data, so any file can be written a few rows at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.checkpoints.limits import MAX_RANK, MAX_TENSORS, natural
from mlx_t5.checkpoints.stored_tensor import StoredTensor, row_major
from mlx_t5.disk import flush
from mlx_t5.errors import UserError, shown

_MAX_HEADER = 1 << 22  # bytes; t5-11b has a header of 60 kB
_TYPES = MappingProxyType(
    {
        "F64": ("float64", 8),
        "F32": ("float32", 4),
        "F16": ("float16", 2),
        "BF16": ("bfloat16", 2),
        "I64": ("int64", 8),
        "I32": ("int32", 4),
        "I16": ("int16", 2),
        "I8": ("int8", 1),
        "U64": ("uint64", 8),
        "U32": ("uint32", 4),
        "U16": ("uint16", 2),
        "U8": ("uint8", 1),
        "BOOL": ("bool", 1),
        "F8_E4M3": ("float8_e4m3", 1),
        "F8_E5M2": ("float8_e5m2", 1),
    }
)
_CODES = MappingProxyType({name: (code, size) for code, (name, size) in _TYPES.items()})


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """Reads the header of a safetensors file.

    Args:
        path: the file; only its header is read.

    Returns:
        The tensors in the order of their bytes, and the file's metadata.

    Raises:
        UserError: the file is truncated, or its header is malformed or does not match the file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{path}: not a whole safetensors file ({size} bytes): fetch it again")
        if length > _MAX_HEADER:
            raise UserError(f"{path}: damaged: its header is too large for a list of tensors")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        metadata = dict(header.pop("__metadata__", None) or {})
        if len(header) > MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} tensors")
        tensors = [_tensor(path, name, info, 8 + length) for name, info in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged safetensors header: {error or 'malformed'}") from error
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            name = shown(tensor.name)
            raise UserError(f"{path}: damaged: {name} overlaps another tensor or follows a gap")
        end += tensor.nbytes
    if end != size:
        raise UserError(f"{path}: has {size} bytes, but its header says {end}: fetch it again")
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor(path: Path, name: str, info: dict, data_start: int) -> StoredTensor:
    shape, (begin, end) = info["shape"], info["data_offsets"]
    if not (natural(shape) and natural((begin, end))):
        cause = f"that is no natural number, or more than {MAX_RANK} dimensions"
        raise ValueError(f"{shown(name)} has a shape or offset {cause}")
    if info["dtype"] not in _TYPES:
        raise ValueError(f"{shown(name)} has the unknown type {shown(info['dtype'])}")
    dtype, itemsize = _TYPES[info["dtype"]]
    if end - begin != math.prod(shape) * itemsize:
        raise ValueError(f"{shown(name)} has {end - begin} bytes, which does not fit its shape")
    shape = tuple(shape)
    return StoredTensor(name, path, dtype, itemsize, shape, row_major(shape), data_start + begin)


def data_size(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Returns the number of bytes that tensors take in a file, without the header.

    `tensors` maps each tensor's name to its type, such as "bfloat16", and its shape.
    """
    return sum(math.prod(shape) * _CODES[dtype][1] for dtype, shape in tensors.values())


class SafetensorsWriter:
    """Writes one file: first the header, then each tensor's rows as they arrive.

    At the end of a `with` block the file is closed.

    Args:
        path: the file to make; it must not exist.
        tensors: each tensor's type, such as "bfloat16", and shape, keyed by name, in file order.
        metadata: string pairs for the header's `__metadata__`.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ):
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        offset = 0
        for name, (dtype, shape) in tensors.items():
            code, itemsize = _CODES[dtype]
            end = offset + math.prod(shape) * itemsize
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
            self._next[name], self._end[name] = offset, end
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self._path = path
        self._file = open(path, "xb", buffering=0)
        self._put(len(text).to_bytes(8, "little") + text)

    def append(self, name: str, rows: mx.array) -> None:
        """Writes the next rows of one tensor; calls for different tensors may alternate."""
        # numpy has no bfloat16; as another 16-bit type the rows have the same bytes.
        rows = rows.view(mx.uint16) if rows.dtype == mx.bfloat16 else rows
        data = np.ascontiguousarray(np.array(rows, copy=False))
        start = self._next[name]
        if start + data.nbytes > self._end[name]:
            raise ValueError(f"more data for {name} than its shape has room for")
        if data.nbytes:
            self._file.seek(self._data_start + start)
            self._put(data.reshape(-1).view(np.uint8).data)
        self._next[name] = start + data.nbytes

    def close(self) -> None:
        """Checks that every tensor is complete and flushes the file to the disk."""
        short = [name for name, position in self._next.items() if position != self._end[name]]
        if short:
            raise ValueError(f"{self._path}: incomplete tensors: {', '.join(short)}")
        flush(self._file.fileno())
        self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._file.close()
