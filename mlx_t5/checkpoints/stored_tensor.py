"""Where one tensor lies in a file, and how to read it: whole, or a few rows at a time.

Every weight format that `checkpoint.py` reads (safetensors, zip `.bin`, legacy `.bin`) comes down
to the same facts: raw little-endian elements from some byte of some file on, a type, a shape and
strides. A `StoredTensor` holds these facts, checked against the file, and one reader serves all.

The bytes are read, not mapped: pages of a mapped file count as resident memory of the process until
the system takes them back, and a file cut short while it is mapped kills the process.
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

# Element types a T5 checkpoint can hold: name -> (bytes an element, numpy type to read it as).
# numpy has no bfloat16: its 16 bits are read as an integer and viewed by MLX.
READABLE = {"float32": (4, np.float32), "float16": (2, np.float16), "bfloat16": (2, np.uint16)}
# What MLX folders hold besides: quantised weights, and the scales of some modes.
PACKED = {"uint32": (4, np.uint32), "uint8": (1, np.uint8)}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        name: the tensor's name in the checkpoint.
        path: the file that holds it.
        dtype: "float32", "float16", "bfloat16", or another type's name (then it cannot be read).
        itemsize: bytes an element.
        shape: the tensor's shape.
        strides: in elements, one a dimension.
        offset: byte of the file at which the tensor's first element lies.
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
        """Size in bytes, without gaps between the elements."""
        return self.size * self.itemsize

    @property
    def extent(self) -> int:
        """Elements of the file from the first to the last of this tensor, both included."""
        if self.size == 0:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the file in row-major order without gaps."""
        return self.strides == row_major(self.shape) or self.size == 0

    def row_tiles(self, file: FileIO, max_bytes: int) -> Iterator[mx.array]:
        """Yields the tensor as tiles of whole rows (slices along the first dimension), in order.

        A tensor with gaps or in another order (a slice, a transposed view) is first read in whole.

        Args:
            file: `self.path`, opened unbuffered for reading in binary mode.
            max_bytes: about the most a tile takes; one row is the least that is read at once.

        Raises:
            UserError: the type is not one that MLX computes with, or the file ends too early.
        """
        self.require_readable()
        rows = self.shape[0] if self.shape else 1
        step = max(1, max_bytes * rows // max(1, self.nbytes))
        strided = None if self.is_contiguous else self._strided(file)
        for start in range(0, rows, step):
            yield self._rows(file, slice(start, min(start + step, rows)), strided)

    def require_readable(self) -> None:
        """Raises `UserError` unless the type is one of `READABLE`."""
        if self.dtype not in READABLE:
            raise UserError(
                f"{self.path}: {shown(self.name)} is {self.dtype}; "
                f"only {', '.join(READABLE)} can be read: save the checkpoint in one of these"
            )

    def read(self, file: FileIO) -> mx.array:
        """The whole tensor in its stored type; `file` and errors as in `row_tiles`."""
        self.require_readable()
        strided = None if self.is_contiguous else self._strided(file)
        return self._rows(file, slice(0, self.shape[0] if self.shape else 1), strided)

    def part(self, file: FileIO, axis: int, where: slice) -> mx.array:
        """The rows (axis 0) or columns (axis 1) of a slice; nothing else is read.

        Quantised weights can be read too, as they are stored. `file` and errors as in `row_tiles`.
        """
        if self.dtype not in PACKED:
            self.require_readable()
        strided = None if self.is_contiguous else self._strided(file)
        if axis == 0:
            return self._rows(file, where, strided)
        if strided is not None:
            return self._to_mlx(np.ascontiguousarray(strided[:, where]))
        rows, columns = self.shape
        count = where.stop - where.start
        result = self._empty(rows * count).reshape(rows, count)
        for i in range(rows):
            self._read_into(result[i], file, i * columns + where.start)
        return self._to_mlx(result)

    def _rows(self, file: FileIO, where: slice, strided: np.ndarray | None) -> mx.array:
        """A slice along the first dimension, of the file or, if it has been read, of `strided`."""
        if strided is not None:
            return self._to_mlx(np.ascontiguousarray(strided[where]))
        row, count = math.prod(self.shape[1:]), where.stop - where.start
        flat = self._elements(file, where.start * row, count * row)
        return self._to_mlx(flat.reshape((count, *self.shape[1:]) if self.shape else ()))

    def _empty(self, count: int) -> np.ndarray:
        return np.empty(count, np.dtype((READABLE | PACKED)[self.dtype][1]).newbyteorder("<"))

    def _elements(self, file: FileIO, start: int, count: int) -> np.ndarray:
        flat = self._empty(count)
        self._read_into(flat, file, start)
        return flat

    def _read_into(self, flat: np.ndarray, file: FileIO, start: int) -> None:
        """Fills an array with the elements of the file from `start` on."""
        buffer = flat.data.cast("B") if flat.size else memoryview(b"")
        file.seek(self.offset + start * self.itemsize)
        while len(buffer):
            n = file.readinto(buffer)
            if not n:
                name = shown(self.name)
                raise UserError(f"{self.path}: the file ends inside {name}: fetch it again")
            buffer = buffer[n:]

    def _strided(self, file: FileIO) -> np.ndarray:
        flat = self._elements(file, 0, self.extent)
        steps = tuple(step * self.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)

    def _to_mlx(self, array: np.ndarray) -> mx.array:
        result = mx.array(array)
        return result.view(mx.bfloat16) if self.dtype == "bfloat16" else result


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape laid out row by row."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
