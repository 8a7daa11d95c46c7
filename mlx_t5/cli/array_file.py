"""Vectors as an array of NumPy's: a file that can be read however its writer ends."""

from __future__ import annotations

import io
import os
from typing import IO, Any

import numpy as np

from mlx_t5.cli.output import claimed, require_there, writing


class ArrayFile:
    """Rows of a float32 array, as numpy.load reads it; a context manager.

    A row of NaN stands for a prompt that cannot be embedded, so that rows stay those of the input.
    The header follows the rows, one by one. There is no file as long as there is no vector.
    """

    def __init__(self, path: str):
        self._path, self._rows, self._width = path, 0, 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_) -> None:
        if self._file:
            with writing(self._path):
                self._file.close()

    def write(self, item: Any, outcome: Any, number: int | None = None) -> None:
        """Writes one vector, or a row of NaN for an error.

        Raises:
            UserError: the file cannot be written, or is no longer there.
        """
        failed = isinstance(outcome, Exception)
        self._rows += 1
        with writing(self._path):
            if not self._file and not failed:
                self._width, self._file = len(outcome), self._opened()
                self._file.write(self._header())
                self._write_rows(np.full((self._rows - 1, self._width), np.nan))
            if self._file:
                self._write_rows(np.full(self._width, np.nan) if failed else np.asarray(outcome))

    def _opened(self) -> IO[bytes]:
        """The file, to be written and rewritten; what it held is gone once it is this process's."""

        def as_it_is(name: str, flags: int) -> int:
            return os.open(name, flags & ~os.O_TRUNC, 0o666)

        return claimed(open(self._path, "wb", opener=as_it_is), self._path)

    def _write_rows(self, rows: np.ndarray) -> None:
        assert self._file is not None
        self._file.write(rows.astype("<f4").tobytes())
        self._file.seek(0)
        self._file.write(self._header())
        self._file.seek(0, os.SEEK_END)
        self._file.flush()
        require_there(self._file, self._path)

    def _header(self) -> bytes:
        """NumPy's header, which has room for any number of rows and so keeps its length."""
        header = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, self._width)}
        np.lib.format.write_array_header_1_0(header, shape)
        return header.getvalue()
