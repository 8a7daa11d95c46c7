"""One tensor in a file: its position, and how to read it whole or a few rows at a time.

In every weight format that `checkpoint.py` reads (safetensors, zip `.bin`, legacy `.bin`), a tensor
is raw little-endian elements at an offset in a file, with a type, a shape and strides. A
`StoredTensor` holds these facts, checked against the file, and one reader serves all formats.

The bytes are read, not mapped: pages of a mapped file count as resident memory of the process until
the system evicts them, and a file that is truncated while it is mapped kills the process.
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

# Element types a T5 checkpoint can hold, by name the numpy type to read them as. numpy has no
# bfloat16: its 16 bits are read as an integer and viewed by MLX.
READABLE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
# What MLX folders hold besides: quantised weights, and the scales of some modes.
PACKED = {"uint32": np.uint32, "uint8": np.uint8}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        name: the tensor's name in the checkpoint.
        path: the file that holds it.
        dtype: "float32", "float16", "bfloat16", or another type's name (then it cannot be read).
        itemsize: bytes per element.
        shape: the tensor's shape.
        strides: strides in elements, one a dimension.
        offset: position of its first element in the file, in bytes.
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
        """The number of elements in the file from its first to its last, both included."""
        if self.size == 0:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the file in row-major order without gaps."""
        return self.strides == row_major(self.shape) or self.size == 0

    def row_tiles(self, file: FileIO, max_bytes: int) -> Iterator[mx.array]:
        """Yields the tensor as tiles of whole rows (slices along the first dimension), in order.

        A tensor with gaps or in another order (a slice, a transposed view) is first read whole.

        Args:
            file: `self.path`, opened unbuffered for reading in binary mode.
            max_bytes: approximate maximum of a tile; a tile has at least one row.

        Raises:
            UserError: the type is not one that MLX computes with, or the file ends too early.
        """
        self.require_readable()
        rows = self.shape[0] if self.shape else 1
        step = max(1, max_bytes * rows // max(1, self.nbytes))
        whole = None if self.is_contiguous else self._strided(file)
        for start in range(0, rows, step):
            where = slice(start, min(start + step, rows))
            yield self.part(file, 0, where) if whole is None else self._to_mlx(whole[where])

    def require_readable(self) -> None:
        """Raises `UserError` unless the type is one of `READABLE`."""
        if self.dtype not in READABLE:
            raise UserError(
                f"{self.path}: {shown(self.name)} is {self.dtype}; "
                f"only {', '.join(READABLE)} can be read: save the checkpoint in one of these"
            )

    def read(self, file: FileIO) -> mx.array:
        """Reads the whole tensor in its stored type; `file` and errors as in `row_tiles`."""
        self.require_readable()
        return self.part(file, 0, slice(0, self.shape[0] if self.shape else 1))

    def part(self, file: FileIO, axis: int, where: slice) -> mx.array:
        """Reads the rows (axis 0) or columns (axis 1) of a slice, and only these without gaps.

        Quantised weights are read as they are stored. `file` and errors as in `row_tiles`.
        """
        if self.dtype not in PACKED:
            self.require_readable()
        count = where.stop - where.start
        if not self.is_contiguous:
            whole = self._strided(file)
            array = whole[where] if axis == 0 else whole[:, where]
        elif axis == 0:
            array = self._empty((count, *self.shape[1:]) if self.shape else ())
            self._read_into(array, file, where.start * math.prod(self.shape[1:]))
        else:
            array = self._empty((self.shape[0], count))
            for i, row in enumerate(array):
                self._read_into(row, file, i * self.shape[1] + where.start)
        return self._to_mlx(array)

    def _to_mlx(self, array: np.ndarray) -> mx.array:
        result = mx.array(np.asarray(array, order="C"))
        return result.view(mx.bfloat16) if self.dtype == "bfloat16" else result

    def _strided(self, file: FileIO) -> np.ndarray:
        """Reads a tensor with gaps or in another order, as a strided view of its elements."""
        flat = self._empty(self.extent)
        self._read_into(flat, file, 0)
        steps = tuple(step * self.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)

    def _empty(self, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, np.dtype((READABLE | PACKED)[self.dtype]).newbyteorder("<"))

    def _read_into(self, array: np.ndarray, file: FileIO, start: int) -> None:
        """Fills an array with the file's elements from `start` on."""
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
