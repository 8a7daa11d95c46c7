"""Reads prompts one by one, from the command line, a file or a pipe.

Prompts are UTF-8; a file may also be UTF-16 with a byte order mark. Nothing here imports MLX, so
that bad input can be refused before a model is loaded.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import queue
import select
import stat
import string
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.text.prompts import Prompt

WRITE_SOMETHING = "write what the model is to work on"
TOO_LONG = "is longer than 1 MiB; cut it into shorter texts"
BYTES = "latin-1"  # the encoding in which every byte is one character
SAVE = "save the text as UTF-8, or name its encoding (main.py --encoding)"
LONGEST_LINE = 1 << 20  # characters; of a longer one, tokens and encoding would exceed the memory
UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True)
class Line(Prompt):
    """A prompt of the input, or the `UserError` that says why its line cannot be used.

    Attributes:
        target: the second text of the line, if it has one that is not a prediction.
        fields: the further fields of its JSON object, which come back with its result.
    """

    target: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt; "" if the line cannot be used."""
        return self.source if isinstance(self.source, str) else ""

    @property
    def pair(self) -> Any:
        """The prompt and its target, which may be None; or the error."""
        return self.source if isinstance(self.source, Exception) else (self.text, self.target)


def read_prompts(prompts: Sequence[str], whole: bool = False, blank: bool = False) -> list[Line]:
    """Checks the prompts, and replaces "-" by standard input, of any length unless `whole`.

    Prompts without a word are refused unless `blank`.
    """
    lines = []
    for index, prompt in enumerate(prompts):
        where = "standard input" if prompt == "-" else "the prompt"
        if prompt == "-":
            data = sys.stdin.buffer.read(LONGEST_LINE + 2 if whole else -1).rstrip(b"\r\n")
            if whole and len(data) > LONGEST_LINE:
                raise UserError(f"{where} {TOO_LONG}")
            prompt = _text(data, where)
        lines.append(Line(_checked(prompt, where, blank), index))
    return lines


def may_be_piped() -> bool:
    """Whether standard input is a file or a pipe, which may hold a prompt."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # it is closed, or replaced by something in memory
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def is_piped() -> bool:
    """Whether standard input is a file or pipe in which bytes wait; waits for nothing itself."""
    if not may_be_piped() or not select.select([sys.stdin], [], [], 0)[0]:
        return False
    data: Any = sys.stdin.buffer
    return bool(data.peek(1))  # what has ended is ready, but empty


def read_document(name: str, file_type: str = "", encoding: str = "") -> str:
    """A file's text, including byte order mark and line ends; "-" is standard input."""
    where = "standard input" if name == "-" else name
    with _opened(name) as file:
        data = file.read()
    text = _text(data, where, encoding or UTF_16.get(data[:2], "utf-8"))
    if file_type:
        from mlx_t5.text.subtitles import find_words  # slow to import, and few files need it

        find_words(text, file_type)
    return text


class Lines(Iterator[Any]):
    """The prompts of a run, and their number; it is None for a pipe, see `ReadAhead`."""

    waited = 0.0  # seconds spent waiting for a pipe or a terminal

    def __init__(self, lines: Iterable[Line], count: int | None) -> None:
        self._lines, self.count = iter(lines), count

    def __next__(self) -> Any:
        return next(self._lines)

    def ready(self) -> bool:
        """Whether the next prompt, or the end, can be read without waiting."""
        return True


@dataclass
class LineReader:
    """Reads the prompts of a file line by line, so a file may exceed the memory.

    Lines end with LF, CRLF or CR; blank lines at the end are ignored unless `trailing`.

    Attributes:
        name: a file with one prompt a line; "-" is standard input. If the name ends in .jsonl, each
            line is an object with a "prompt".
        targets: whether each line is an object with a "prompt" and a "target", whatever the suffix
            of the name is.
        optional: the name of a second text that each object may have, which becomes the line's
            prediction if it is named so, or else its target; "" for none.
        blank: whether a prompt may be empty.
        trailing: whether blank lines at the end are prompts, too.
        encoding: the file's encoding; "" for UTF-8, or UTF-16 if there is a byte order mark.
        if_blank: what to do about a blank line, for its error.

    Raises:
        UserError: the file cannot be read.
    """

    name: str
    targets: bool = False
    optional: str = ""
    blank: bool = False
    trailing: bool = False
    encoding: str = ""
    if_blank: str = WRITE_SOMETHING

    def __post_init__(self) -> None:
        self._shown = "standard input" if self.name == "-" else self.name
        self._as_json = self.targets or self.name.endswith(".jsonl")
        self._second = "target" if self.targets else self.optional
        data = _opened(self.name)
        self._is_file = stat.S_ISREG(os.fstat(data.fileno()).st_mode)
        # A pipe is not waited for, not even for a byte order mark.
        marked = self._is_file and data.peek(2)[:2] in UTF_16
        self._encoding = self.encoding or ("UTF-16" if marked else "")
        self._file = io.TextIOWrapper(data, self._encoding or BYTES)

    def lines(self) -> Lines:
        """The prompts; raises `UserError` if there is none, for an empty pipe at `next`."""
        if not self._is_file:
            return ReadAhead(self.read())
        begin = self._file.tell()
        count = sum(1 for _ in self._numbered())
        self._file.seek(begin)
        return Lines(self.read(), count)

    def read(self) -> Iterator[Line]:
        with self._file:
            for n, line in self._numbered():
                where, record = f"{self._shown} line {n}", dict[str, Any]()
                try:
                    if len(line) > LONGEST_LINE:
                        raise UserError(f"{where} {TOO_LONG}")
                    text, blank = _text(line, where), self.blank and not self._as_json
                    text = _checked(text, where, blank, self.if_blank)
                    if self._as_json:
                        record = _record(text, where)
                        if self.targets and "completion" in record:
                            record.setdefault("target", record.pop("completion"))
                        yield self._of(record, n - 1, where)
                    else:
                        yield Line(text, n - 1)
                except UserError as error:
                    yield Line(error, n - 1, fields=self._further(record))

    def _further(self, record: Mapping[str, Any]) -> dict[str, Any]:
        read = "prompt", self._second
        return {name: value for name, value in record.items() if name not in read}

    def _of(self, record: Mapping[str, Any], index: int, where: str) -> Line:
        required = ("prompt", "target") if self.targets else ("prompt",)
        for name in required:
            if not isinstance(record.get(name), str):
                example = ", ".join(f'"{name}": "…"' for name in required)
                raise UserError(f"{where} has no {name}; write {{{example}}}")
        prompt, fields = _checked(record["prompt"], where, self.blank), self._further(record)
        second = record.get(self._second) if self._second else None
        if second is not None:
            if not self.targets and not (isinstance(second, str) and second.strip()):
                kind = "empty" if isinstance(second, str) else "no text"
                raise UserError(f"{where} has a {self._second} that is {kind}; leave it out")
            second = _checked(second, where)
        if self._second == "prediction":
            return Line(prompt, index, second, fields=fields)
        return Line(prompt, index, target=second, fields=fields)

    def _lines(self) -> Iterator[str]:
        """Yields lines with their ends; of a line that is too long, only its beginning."""
        while line := self._file.readline(LONGEST_LINE + 1):
            yield line
            while len(line) > LONGEST_LINE and not line.endswith("\n"):
                line = self._file.readline(LONGEST_LINE + 1)

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yields lines with numbers; blank lines are b"", but those at the end are left out."""
        yielded, empty = 0, True
        try:
            for n, line in enumerate(self._lines(), 1):
                blank = not line.strip(string.whitespace)
                empty = empty and blank
                if blank and not self.trailing:
                    continue  # it may be at the end
                yield from ((missing, b"") for missing in range(yielded + 1, n))
                text = "" if blank else line.removesuffix("\n")
                yield n, text.encode("utf-8" if self._encoding else BYTES)
                yielded = n
        except UnicodeError:
            raise UserError(f"{self._shown} is not {self._encoding.upper()}; {SAVE}") from None
        if empty:
            raise UserError(f"{self._shown} is empty; write one prompt a line")


def _opened(name: str) -> io.BufferedReader:
    try:
        if name != "-":
            return open(name, "rb")
        # Not sys.stdin itself: a thread that waits in it would disturb the exit of the process.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except FileNotFoundError:
        raise UserError(f"there is no file {name}; check the path") from None


def _text(data: bytes, where: str, encoding: str = "utf-8-sig") -> str:
    try:
        text = data.decode(encoding)
        if "\0" in text:  # as in UTF-16 without a byte order mark
            raise ValueError("binary")
        return text
    except ValueError:
        raise UserError(f"{where} is not {encoding.removesuffix('-sig').upper()}; {SAVE}") from None


def _record(line: str, where: str) -> dict[str, Any]:
    """A line's JSON object, or {} if it is something else. Errors begin with `where`."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError):  # JSON beyond Python's limits
        limits = "a number is too long or the nesting too deep"
        raise UserError(f"{where} is JSON that cannot be read ({limits})") from None
    return record if isinstance(record, dict) else {}


def _checked(text: str, where: str, blank: bool = False, cure: str = WRITE_SOMETHING) -> str:
    if not (blank or text.strip()):
        raise UserError(f"{where} is empty; {cure}")
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line, or \ud800 in JSON
        raise UserError(f"{where} is not valid Unicode; give it as UTF-8") from None
    return text


class ReadAhead(Lines):
    """Lines of a pipe: reads a bounded number of items ahead, in a thread, and passes errors on."""

    def __init__(self, items: Iterable[Any], ahead: int = 64) -> None:
        self._drawn: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self.count = None
        # A daemon, so that a source that never ends does not keep the process alive.
        threading.Thread(target=self._draw, args=(items,), daemon=True).start()

    def _draw(self, items: Iterable[Any]) -> None:
        end: BaseException = StopIteration()
        try:
            for item in items:
                self._drawn.put((item, None))
        except BaseException as error:
            end = error
        self._drawn.put((None, end))

    def ready(self) -> bool:
        """Whether the next item, or the end, can be returned without waiting."""
        return not self._drawn.empty()

    def __next__(self) -> Any:
        started, drawn = time.perf_counter(), None
        try:
            while drawn is None:  # a Ctrl-C just before a wait does not end the wait
                with contextlib.suppress(queue.Empty):
                    drawn = self._drawn.get(timeout=0.5)
        finally:  # also after Ctrl-C
            self.waited += time.perf_counter() - started
        item, end = drawn
        if end is not None:
            self._drawn.put((None, end))  # for further calls
            raise end
        return item
