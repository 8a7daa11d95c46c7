"""The files that results are written to, in UTF-8, safely."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar

from mlx_t5.cli.lines import LineOf, error_of, text_object
from mlx_t5.disk import lock
from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from mlx_t5.cli.run_record import RunRecord

ARRAY = ".npy"  # how the name of an array of NumPy's ends
File = TypeVar("File", bound=IO[Any])


def check_output_file(output_file: str, input_file: str | None) -> None:
    """Checks, before the work begins, that its results can be written.

    Raises:
        UserError: the folder is missing or closed, the file is the input itself, or an array is to
            be written where nothing can be rewritten.
    """
    path = Path(output_file)
    if path.is_dir():
        raise UserError(f"{output_file} is a folder; name a file for the results")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for {path.name}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{output_file} may not be written; choose another place")
    if input_file not in (None, "-") and path.exists() and path.samefile(input_file):
        raise UserError(f"{output_file} is the input file too; give the results another name")
    if output_file.endswith(ARRAY) and path.exists() and not path.is_file():
        cure = "name a file, or have JSON lines written"
        raise UserError(f"{output_file} is a pipe or a device, which no array fits into; {cure}")


def claimed(file: File, path: str, keep: int = 0) -> File:
    """Makes an open file this process's alone, and cuts off what is not kept of it.

    Raises:
        UserError: another process writes it, or has changed it meanwhile; the file is closed then.
    """
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        if not lock(file.fileno()):
            file.close()
            raise UserError(f"{path} is being written by another process; wait for it")
        if os.fstat(file.fileno()).st_size < keep:
            file.close()
            raise UserError(f"{path} has become shorter since it was read; start again")
        file.truncate(keep)
    return file


def require_there(file: IO[Any], path: str) -> None:
    """Raises `UserError` if a file was removed while it is written."""
    if not os.fstat(file.fileno()).st_nlink:
        raise UserError(f"{path} was removed while it was written; start again")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Names the file that cannot be written on.

    Raises:
        UserError: in place of an OSError.
    """
    try:
        yield
    except BrokenPipeError:  # whoever reads has seen enough
        raise
    except OSError as error:
        cure = "make room, or name another --output-file"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {cure}") from None


class LineFile:
    """Lines of results, each written at once, so that an interruption loses none.

    A context manager.

    Args:
        path: file to write, left as it is until there is a result; None is standard output.
        keep: bytes at the beginning of the file that are kept.
        record: what lies beside it while it is written.
        line_of: makes the line of a prompt and what became of it.
    """

    def __init__(
        self,
        path: str | None,
        keep: int = 0,
        record: RunRecord | None = None,
        line_of: LineOf = text_object,
    ):
        self._path, self._keep, self._record, self._line_of = path, keep, record, line_of
        self._file: TextIO | None = None if path else sys.stdout

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_) -> None:
        if self._path and self._file:
            with writing(self._path):
                self._file.close()

    def write(self, item: Any, outcome: Any, number: int | None = None) -> None:
        """Writes what became of a prompt; `number` is which one of the input it is, from 1."""
        self.write_line(self._line_of(item, outcome), number if error_of(outcome) else None)

    def write_line(self, line: str, failed: int | None = None) -> None:
        """Writes one line.

        Args:
            line: without its end.
            failed: the number of its prompt, if that has ended in an error.

        Raises:
            UserError: the file cannot be written, or is no longer there.
        """
        if not self._path:
            print(line, file=self._file, flush=True)
            return
        with writing(self._path):
            if not self._file:
                file = open(self._path, "a", encoding="utf-8", errors="backslashreplace")
                self._file = claimed(file, self._path, self._keep)
                if self._record:
                    self._record.begin()
            if failed and self._record:
                self._record.fail(failed)
            print(line, file=self._file, flush=True)
            require_there(self._file, self._path)
