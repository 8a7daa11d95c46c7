"""Writes vectors as a NumPy array, once all of them have been computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlx_t5.disk import replace_file


class ArrayFile:
    """Collects vectors, and writes them as a float32 array for numpy.load when its block ends.

    Without any vector, no file is written. A prompt that cannot be embedded gets a row of NaN, so
    that row i belongs to line i of the input.
    """

    def __init__(self, path: str):
        self._path = path
        self._rows: list[np.ndarray | None] = []

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_) -> None:
        vectors = [row for row in self._rows if row is not None]
        if not vectors:
            return
        missing = np.full_like(vectors[0], np.nan)
        array = np.stack([missing if row is None else row for row in self._rows])
        replace_file(Path(self._path), lambda path: np.save(path, array), "start again")

    def write(self, item: Any, outcome: Any) -> None:
        failed = isinstance(outcome, Exception)
        self._rows.append(None if failed else np.asarray(outcome, np.float32))
