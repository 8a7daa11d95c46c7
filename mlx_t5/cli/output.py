"""What the command line shows: texts, colours, results as files, and statistics on one line.

Everything written is UTF-8.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar

from mlx_t5.disk import lock
from mlx_t5.errors import UserError
from mlx_t5.sizes import readable

if TYPE_CHECKING:
    from mlx_t5.cli.run_record import RunRecord
    from mlx_t5.engine.rows import Result, Stats
    from mlx_t5.text.detokenizer import StreamingDetokenizer

ARRAY = ".npy"  # how the name of an array of NumPy's ends
Own = TypeVar("Own", bound="LineFile")
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


def opened(path: str, keep: int = 0) -> TextIO:
    """Opens a file for lines of text, after so many bytes of what it holds.

    Raises:
        UserError: another process writes it, or has changed it meanwhile.
    """
    return claimed(open(path, "a", encoding="utf-8", errors="backslashreplace"), path, keep)


def opened_array(path: str) -> IO[bytes]:
    """Opens a file for bytes that are written and rewritten; what it held is gone.

    Raises:
        UserError: another process writes it.
    """

    def as_it_is(name: str, flags: int) -> int:
        return os.open(name, flags & ~os.O_TRUNC, 0o666)

    return claimed(open(path, "wb", opener=as_it_is), path)


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
    """

    def __init__(self, path: str | None, keep: int = 0, record: RunRecord | None = None):
        self._path, self._keep, self._record = path, keep, record
        self._file: TextIO | None = None if path else sys.stdout

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_) -> None:
        if self._path and self._file:
            with writing(self._path):
                self._file.close()

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
                self._file = opened(self._path, self._keep)
                if self._record:
                    self._record.begin()
            if failed and self._record:
                self._record.fail(failed)
            print(line, file=self._file, flush=True)
            require_there(self._file, self._path)


class Painter:
    """Shows who wrote each token: green the draft, cyan copied from the source, magenta the target.

    With `NO_COLOR` set (https://no-color.org) brackets and braces stand for the first two. A token
    that ends inside a character is shown with the token that completes it.
    """

    def __init__(self, no_color: bool):
        colours = {"draft": 32, "copy": 36, "target": 35}
        self._forms = {writer: f"\033[{c}m{{}}\033[0m" for writer, c in colours.items()}
        if no_color:
            self._forms = {"draft": "[{}]", "copy": "{{{}}}", "target": "{}"}

    @property
    def legend(self) -> str:
        """One line that explains the colours."""
        names = {"draft": "by the draft", "copy": "copied", "target": "by the target"}
        return "tokens: " + " ".join(self._forms[w].format(name) for w, name in names.items())

    def paint(self, pieces: Iterable[str], writers: Iterable[str], rest: str = "") -> str:
        """Colours text token by token.

        Args:
            pieces: the text that each token completed.
            writers: who wrote each of them: "draft", "copy" or "target".
            rest: text after the last of them, which the target gets.
        """
        authors = [*zip(pieces, writers, strict=True), (rest, "target")]
        return "".join(self._forms[writer].format(text) for text, writer in authors if text)

    def line(self, result: Result, detokenizer: StreamingDetokenizer) -> str:
        """A whole result, coloured, on one line; the detokenizer is a fresh one."""
        pieces = [*(detokenizer.add([token]) for token in result.tokens), detokenizer.finish()]
        left = len(result.text or "")  # the tokens of a stop string are not shown
        for i, piece in enumerate(pieces):
            pieces[i] = piece[:left]
            left -= len(pieces[i])
        return one_line(self.paint(pieces[:-1], result.writers, pieces[-1]))


class Results(LineFile):
    """Writes finished results in order.

    Args:
        path: see `LineFile`.
        as_json: one JSON object a line; otherwise one text a line.
        paint: makes a coloured line of a result; where results go to a file or are JSON, it is
            shown on standard error besides.
        keep: see `LineFile`.
        record: see `LineFile`.
    """

    def __init__(
        self,
        path: str | None,
        as_json: bool,
        paint: Callable[[Result], str] | None = None,
        keep: int = 0,
        record: RunRecord | None = None,
    ):
        super().__init__(path, keep, record)
        self._as_json, self._paint = as_json, paint
        self._aside = path is not None or as_json

    def write(self, prompt: str, result: Result, number: int | None = None) -> None:
        """Writes one result; an empty line, or JSON with the error, where there is no text.

        Args:
            prompt: its prompt.
            result: what became of that.
            number: which prompt of the input it is, from 1.
        """
        paint = None if result.error else self._paint
        line = json_line(prompt, result) if self._as_json else one_line(result.text or "")
        if paint and self._aside:
            print(paint(result), file=sys.stderr)
        elif paint:
            line = paint(result)
        self.write_line(line, number if result.error else None)


def one_line(text: str) -> str:
    r"""A text on one line: a line break in it is written as the two characters `\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", r"\n")


def json_line(prompt: str, result: Result) -> str:
    """The object that `--json` promises to scripts."""
    record: dict[str, Any] = {
        "prompt": prompt,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": asdict(result.stats),
    }
    if result.score is not None:
        record["score"] = result.score
    if result.error:
        record["error"] = result.error
    return json.dumps(record, ensure_ascii=False)


@dataclass
class Totals:
    """Sums over results, so that their number costs no memory."""

    results: int = 0
    tokens: int = 0
    target_calls: int = 0
    decided: float = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    peak_memory_bytes: int = 0

    def add(self, stats: Stats) -> None:
        """Counts a result in."""
        self.results += 1
        self.tokens += stats.generated_tokens
        self.target_calls += stats.target_calls
        self.decided += stats.tokens_per_call * stats.target_calls
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.copied += stats.speculation.copied_accepted
        self.peak_memory_bytes = max(self.peak_memory_bytes, stats.peak_memory_bytes)

    @classmethod
    def of_all(cls, several: Sequence[dict[str, Any]]) -> Totals:
        """The sums of several, each as `asdict` gives it."""
        found = cls()
        for name in vars(found):
            values = [each[name] for each in several]
            setattr(found, name, max(values) if name == "peak_memory_bytes" else sum(values))
        return found

    def summary(self, seconds: float, unit: str = "prompts") -> str:
        """One line.

        Args:
            seconds: how long the results took together.
            unit: what to call several of them.
        """
        rate = self.tokens / max(seconds, 1e-9)
        parts = [f"{self.results} {unit}"] if self.results > 1 else []
        parts += [f"{self.tokens} tokens in {seconds:.2f} s", f"{rate:.1f} tokens/s"]
        if self.drafted:
            kept = f"{self.accepted} of {self.drafted} drafted"
            parts.append(f"acceptance {self.accepted / self.drafted:.0%} ({kept})")
        if self.copied:
            parts.append(f"{self.copied} copied")
        if self.target_calls:
            parts.append(f"{self.decided / self.target_calls:.2f} tokens per target call")
        if self.peak_memory_bytes:
            parts.append(f"peak memory {readable(self.peak_memory_bytes)}")
        return " · ".join(parts)
