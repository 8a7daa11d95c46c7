"""Describes the position of a tensor in a file, and reads it whole or a few rows at a time.

In every weight format that `checkpoint.py` reads (safetensors, zip `.bin`, legacy `.bin`), a tensor
is stored as raw little-endian elements at an offset in a file, and has a type, a shape and strides.
A `StoredTensor` holds these facts, after a format's reader has checked them against the file. So
one class reads the tensors of all formats.

The bytes are read, not memory-mapped. Pages of a mapped file count as resident memory of the
process until the system evicts them, and truncating a mapped file kills the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.errors import UserError, shown

# The types that a T5 checkpoint can hold, and the numpy type by which each is read. numpy has no
# bfloat16: the 16 bits are read as an integer, and MLX views them as bfloat16.
READABLE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        name: the tensor's name in the checkpoint.
        path: the file that holds it.
        dtype: the name of the elements' type; `read` supports the types `READABLE` only.
        itemsize: bytes per element.
        shape: the tensor's shape.
        strides: the stride of each dimension, in elements.
        offset: the position of the first element in the file, in bytes.
    """

    name: str
    path: Path
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes, without gaps between the elements."""
        return self.size * self.itemsize

    @property
    def extent(self) -> int:
        """The number of elements in the file from the tensor's first to its last, with any gaps."""
        if self.size == 0:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the file in row-major order without gaps."""
        return self.strides == row_major(self.shape) or self.size == 0

    def row_tiles(self, file: FileIO, max_bytes: int) -> Iterator[mx.array]:
        """Yields the tensor as tiles of whole rows (slices along the first dimension), in order.

        If the tensor has gaps or is not in row-major order (a slice, a transposed view), it is read
        as a whole first.

        Args:
            file: the file at `self.path`, opened unbuffered for reading in binary mode.
            max_bytes: the approximate maximum size of a tile; a tile has at least one row.

        Raises:
            UserError: the type is not one of `READABLE`, or the file ends too early.
        """
        self.require_readable()
        rows = self.shape[0] if self.shape else 1
        step = max(1, max_bytes * rows // max(1, self.nbytes))
        whole = None if self.is_contiguous else self._strided(file)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield (
                self._rows(file, start, stop) if whole is None else self._to_mlx(whole[start:stop])
            )

    def require_readable(self) -> None:
        """Raises `UserError` unless the type is one of `READABLE`."""
        if self.dtype not in READABLE:
            raise UserError(
                f"{self.path}: {shown(self.name)} is {self.dtype}; "
                f"only {', '.join(READABLE)} can be read: save the checkpoint in one of these"
            )

    def read(self, file: FileIO) -> mx.array:
        """Reads the whole tensor in its stored type; `file` and errors are as in `row_tiles`."""
        self.require_readable()
        if not self.is_contiguous:
            return self._to_mlx(self._strided(file))
        return self._rows(file, 0, self.shape[0] if self.shape else 1)

    def _rows(self, file: FileIO, start: int, stop: int) -> mx.array:
        """Reads rows of a contiguous tensor."""
        array = self._empty((stop - start, *self.shape[1:]) if self.shape else ())
        self._read_into(array, file, start * math.prod(self.shape[1:]))
        return self._to_mlx(array)

    def _to_mlx(self, array: np.ndarray) -> mx.array:
        result = mx.array(np.asarray(array, order="C"))
        return result.view(mx.bfloat16) if self.dtype == "bfloat16" else result

    def _strided(self, file: FileIO) -> np.ndarray:
        """Reads a tensor that has gaps or is not in row-major order; returns a strided view."""
        flat = self._empty(self.extent)
        self._read_into(flat, file, 0)
        steps = tuple(step * self.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)

    def _empty(self, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, np.dtype(READABLE[self.dtype]).newbyteorder("<"))

    def _read_into(self, array: np.ndarray, file: FileIO, start: int) -> None:
        """Fills an array with elements from the file, starting at the tensor's element `start`."""
        buffer = array.data.cast("B") if array.size else memoryview(b"")
        file.seek(self.offset + start * self.itemsize)
        while len(buffer):
            n = file.readinto(buffer)
            if not n:
                name = shown(self.name)
                raise UserError(f"{self.path}: the file ends inside {name}: fetch it again")
            buffer = buffer[n:]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a tensor of this shape in row-major order."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
