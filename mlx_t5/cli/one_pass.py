"""What the command line writes without generating: scores and vectors.

Scores and vectors are JSON lines; vectors are an array of NumPy's where the file's name ends in
.npy. Results are written as they finish, so an interruption loses none.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mlx_t5.cli.output import ARRAY, LineFile, opened_array, require_there, writing
from mlx_t5.errors import UserError
from mlx_t5.sizes import readable

if TYPE_CHECKING:
    from mlx_t5.cli.run_record import RunRecord
    from mlx_t5.scoring.pairs import Score


class JsonLines(LineFile):
    """One JSON object a line.

    Args:
        path: see `LineFile`.
        record: makes the object of an item and its outcome.
        keep: see `LineFile`.
        run: see `LineFile`.
    """

    def __init__(
        self,
        path: str | None,
        record: Callable[[Any, Any], dict],
        keep: int = 0,
        run: RunRecord | None = None,
    ):
        super().__init__(path, keep, run)
        self._object_of = record

    def write(self, item: Any, outcome: Any) -> None:
        """Writes one result."""
        record = self._object_of(item, outcome)
        self.write_line(json.dumps(record, ensure_ascii=False, allow_nan=False))


class ArrayFile:
    """Rows of a float32 array, as numpy.load reads it; a context manager.

    A row of NaN stands for a prompt that cannot be embedded, so that rows stay those of the input.
    The header follows the rows, one by one, so that the file can be read however its writer ends.
    There is no file as long as there is no vector.
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

    def write(self, item: Any, outcome: Any) -> None:
        """Writes one vector, or a row of NaN for an error.

        Raises:
            UserError: the file cannot be written, or is no longer there.
        """
        with writing(self._path):
            self._write(outcome)

    def _write(self, outcome: Any) -> None:
        self._rows += 1
        if not self._file and not isinstance(outcome, Exception):
            self._width = len(outcome)
            self._file = opened_array(self._path)
            self._file.write(self._header())
            self._write_rows(np.full((self._rows - 1, self._width), np.nan))
        if self._file:
            failed = isinstance(outcome, Exception)
            self._write_rows(np.full(self._width, np.nan) if failed else np.asarray(outcome))

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


class ArrayOfLines(ArrayFile):
    """An array of vectors that come as lines of JSON, see `embedding_record`."""

    def write_line(self, line: str) -> None:
        """Writes one vector."""
        record = json.loads(line)
        failed = UserError(record["error"]) if "error" in record else None
        self.write(None, failed or np.array(record["embedding"], np.float32))


def score_record(item: Any, score: Score) -> dict:
    """The object of a pair of prompt and target."""
    prompt, target = item if isinstance(item, tuple) else ("", "")
    record = {"prompt": prompt, "target": target}
    if score.error:
        return {**record, "logprob": None, "token_logprobs": [], "tokens": [], "error": score.error}
    more = {"token_logprobs": score.token_logprobs, "tokens": score.tokens}
    return {**record, "logprob": score.logprob, **more}


def embedding_record(item: Any, outcome: np.ndarray | Exception) -> dict:
    """The object of a prompt."""
    record: dict[str, Any] = {"prompt": item if isinstance(item, str) else ""}
    if isinstance(outcome, Exception):
        return {**record, "embedding": None, "error": str(outcome)}
    return {**record, "embedding": [float(str(number)) for number in outcome]}


def error_of(outcome: Any) -> str | None:
    """What went wrong with an item, if anything did."""
    return str(outcome) if isinstance(outcome, Exception) else getattr(outcome, "error", None)


def output_of_vectors(
    path: str | None, keep: int = 0, run: RunRecord | None = None
) -> JsonLines | ArrayFile:
    """Where vectors go: an array where the name says so, and JSON lines otherwise."""
    is_array = path is not None and path.endswith(ARRAY)
    return ArrayFile(path) if path and is_array else JsonLines(path, embedding_record, keep, run)


def summary(count: int, seconds: float, peak_memory_bytes: int) -> str:
    """One line: how many prompts there were, how long they took, what memory."""
    parts = [
        f"{count} prompt{'s' * (count != 1)} in {seconds:.2f} s",
        f"{count / max(seconds, 1e-9):.1f} prompts/s",
        f"peak memory {readable(peak_memory_bytes)}",
    ]
    return " · ".join(parts)
