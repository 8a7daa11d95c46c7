"""Formats results as lines of text or JSON, and writes them to files safely."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar

from mlx_t5.disk import lock
from mlx_t5.errors import UserError
from mlx_t5.text.detokenizer import StreamingDetokenizer

if TYPE_CHECKING:
    import numpy as np

    from mlx_t5.engine.rows import Result
    from mlx_t5.scoring.pairs import Score

ARRAY = ".npy"  # suffix of a NumPy array's file
LineOf = Callable[[Any, Any], str]  # makes a line from a prompt and its outcome
File = TypeVar("File", bound=IO[Any])


class Painter:
    """Colors tokens by their origin: green (draft model), cyan (copied), magenta (target).

    Copied tokens are from the prompt, from earlier output or from the user's prediction. With
    `NO_COLOR` (https://no-color.org), brackets enclose the draft's tokens and braces copied ones.
    """

    def __init__(self, tokenizer: Any = None):
        self._tokenizer = tokenizer
        colors = {"draft": 32, "copy": 36, "target": 35}
        self._forms = {writer: f"\033[{c}m{{}}\033[0m" for writer, c in colors.items()}
        if os.environ.get("NO_COLOR"):
            self._forms = {"draft": "[{}]", "copy": "{{{}}}", "target": "{}"}

    @property
    def legend(self) -> str:
        names = {"draft": "by the draft", "copy": "copied", "target": "by the target"}
        return "tokens: " + " ".join(self._forms[w].format(name) for w, name in names.items())

    def paint(self, pieces: Iterable[str], writers: Iterable[str], rest: str = "") -> str:
        """Colors a text token by token.

        Args:
            pieces: for each token, the text that it completed; "" if it completed none.
            writers: for each token, its origin: "draft", "copy" or "target".
            rest: text after the last token, shown in the target's color.
        """
        authors = [*zip(pieces, writers, strict=True), (rest, "target")]
        return "".join(self._forms[writer].format(text) for text, writer in authors if text)

    def line(self, result: Result) -> str:
        detokenizer = StreamingDetokenizer(self._tokenizer)
        pieces = [*map(detokenizer.add, result.tokens), detokenizer.finish()]
        room = len(result.text or "")  # the tokens of a stop string are not shown
        for i, piece in enumerate(pieces):
            pieces[i] = piece[:room]
            room -= len(pieces[i])
        return one_line(self.paint(pieces[:-1], result.writers, pieces[-1]))


def text_lines(as_json: bool, aside: bool, painter: Painter | None = None) -> LineOf:
    """A function that makes the output line of a prompt and its result.

    If the prompt has failed, the line is empty, or with `as_json` an object with the error.

    Args:
        as_json: whether a line is a JSON object; otherwise it is a text.
        aside: whether to print a colored copy of each line on standard error, and return the plain
            line.
        painter: colors the lines; None for no colors.
    """

    def line(prompt: Any, result: Result) -> str:
        painted = painter.line(result) if painter and not result.error else None
        if painted is not None and aside:
            print(painted, file=sys.stderr)
        if as_json:
            return text_object(prompt, result)
        return one_line(result.text or "") if aside or painted is None else painted

    return line


def one_line(text: str) -> str:
    r"""Line breaks become the two characters `\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", r"\n")


def text_object(prompt: Any, result: Result) -> str:
    """The line for a result with `--json`."""
    record: dict[str, Any] = {
        "prompt": _text(prompt),
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": asdict(result.stats),
    }
    if result.score is not None:
        record["score"] = result.score
    if result.error:
        record["error"] = result.error
    if hasattr(result.stats, "pieces"):  # the prompt was a document that was split
        record["pieces"] = [
            {name: value for name, value in vars(piece).items() if value is not None}
            for piece in result.pieces
        ]
    return json.dumps(record, ensure_ascii=False)


def score_object(pair: Any, score: Score) -> str:
    prompt, target = pair if isinstance(pair, tuple) else ("", "")
    record: dict[str, Any] = {"prompt": prompt, "target": target}
    record |= {"logprob": None, "token_logprobs": [], "tokens": []}
    if score.error:
        record["error"] = score.error
    else:
        record |= {name: getattr(score, name) for name in ("logprob", "token_logprobs", "tokens")}
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def embedding_object(prompt: Any, vector: np.ndarray | Exception) -> str:
    record: dict[str, Any] = {"prompt": _text(prompt), "embedding": None}
    if isinstance(vector, Exception):
        record["error"] = str(vector)
    else:
        record["embedding"] = [float(str(number)) for number in vector]
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def error_of(outcome: Any) -> str | None:
    """The error message of an outcome, or of a document's failed pieces; else None."""
    pieces = getattr(outcome, "pieces", [])
    if failed := [piece for piece in pieces if piece.error]:
        where = f"the first, at character {failed[0].start + 1}: {failed[0].error}"
        return f"{len(failed)} of {len(pieces)} pieces stand as they were; {where}"
    return str(outcome) if isinstance(outcome, Exception) else getattr(outcome, "error", None)


def _text(prompt: Any) -> str:
    """An item's prompt: a text, or a pair's first text; "" for an unreadable line."""
    prompt = prompt[0] if isinstance(prompt, tuple) else prompt
    return prompt if isinstance(prompt, str) else ""


# ---- files ---------------------------------------------------------------------------------------


def check_output_file(output_file: str, input_file: str | None) -> None:
    """Checks, before the work begins, that results can be written to this file."""
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
    """Locks an open file for this process, and truncates it to `keep` bytes.

    Raises:
        UserError: another process is writing the file, or it has fewer than `keep` bytes. In both
            cases the file is closed.
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
    """Refuses a file that has been removed since it was opened."""
    if not os.fstat(file.fileno()).st_nlink:
        raise UserError(f"{path} was removed while it was written; start again")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns an OSError in the block, except a closed pipe, into a `UserError` about `path`."""
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except OSError as error:
        cure = "make room, or name another --output-file"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {cure}") from None


class LineFile:
    """Writes lines of results, each without delay, so that an interruption loses none.

    Args:
        path: the file to write; an existing file is not changed before the first result. None:
            standard output.
        keep: number of bytes at the beginning of an existing file to keep, with earlier results.
        line_of: makes a line from a prompt and its outcome.
        end: the end of each line; "" if lines contain their ends.
    """

    def __init__(
        self,
        path: str | None,
        keep: int = 0,
        line_of: LineOf = text_object,
        end: str = "\n",
    ):
        self._end = end
        self._path, self._keep, self._line_of = path, keep, line_of
        self._file: TextIO | None = None if path else sys.stdout

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_) -> None:
        if self._path and self._file:
            with writing(self._path):
                self._file.close()

    def write(self, item: Any, outcome: Any) -> None:
        self.write_line(self._line_of(item, outcome))

    def write_line(self, line: str) -> None:
        if not self._path:
            print(line, end=self._end, file=self._file, flush=True)
            return
        with writing(self._path):
            if not self._file:
                file = open(self._path, "a", encoding="utf-8", errors="backslashreplace")
                self._file = claimed(file, self._path, self._keep)
            print(line, end=self._end, file=self._file, flush=True)
            require_there(self._file, self._path)
