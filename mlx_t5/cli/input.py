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
import stat
import string
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.text.subtitles import find_words

TOO_LONG = "is longer than 1 MiB; cut it into shorter texts"
BYTES = "latin-1"  # the encoding in which every byte is one character
SAVE = "save the text as UTF-8, or name its encoding (main.py --encoding)"
LONGEST_LINE = 1 << 20  # characters; of a longer one, tokens and encoding would exceed the memory
UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
Line = Any  # a prompt, a pair of a prompt and another text, or a UserError


class Prompt(str):
    """A prompt with the further fields of its JSON object, which come back with its result."""

    fields: Mapping[str, Any]


class LineError(UserError):
    """Why a line cannot be used, with the further fields of its JSON object."""

    fields: Mapping[str, Any]


def read_prompts(prompts: Sequence[str], whole: bool = False, blank: bool = False) -> list[str]:
    """Checks the prompts, and replaces "-" by standard input, of any length unless `whole`.

    Prompts without a word are refused unless `blank`.
    """
    texts = []
    for prompt in prompts:
        where = "standard input" if prompt == "-" else "the prompt"
        if prompt == "-":
            data = sys.stdin.buffer.read(LONGEST_LINE + 2 if whole else -1).rstrip(b"\r\n")
            if whole and len(data) > LONGEST_LINE:
                raise UserError(f"{where} {TOO_LONG}")
            prompt = _text(data, where)
        texts.append(_checked(prompt, where, blank))
    return texts


def read_document(name: str, file_type: str = "", encoding: str = "") -> str:
    """A file's text, including byte order mark and line ends; "-" is standard input."""
    where = "standard input" if name == "-" else name
    with _opened(name) as file:
        data = file.read()
    text = _text(data, where, encoding or UTF_16.get(data[:2], "utf-8"))
    if file_type:
        find_words(text, file_type)
    return text


class Lines(Iterator[Line]):
    """Iterates over the prompts of a file; reads line by line, so a file may exceed the memory.

    By default an item is a prompt. With `targets` an item is a pair of a prompt and its target.
    With `optional` an item is a pair of a prompt and a second text, which may be None.

    If a line cannot be used, its item is the `UserError` that says why. Lines end with LF, CRLF or
    CR; blank lines at the end are ignored. A pipe is read ahead in a thread, and `count` is None.
    """

    def __init__(
        self,
        name: str,
        targets: bool = False,
        optional: str = "",
        blank: bool = False,
        encoding: str = "",
    ) -> None:
        """Opens the file.

        Args:
            name: a file with one prompt a line; "-" is standard input. If the name ends in .jsonl,
                each line is an object with a "prompt".
            targets: whether each line is an object with a "prompt" and a "target", whatever the
                suffix of the name is.
            optional: the name of a second text that each object may have; "" for none.
            blank: whether a prompt may be empty.
            encoding: the file's encoding; "" for UTF-8, or UTF-16 if there is a byte order mark.

        Raises:
            UserError: the file cannot be read or is empty; an empty pipe raises at `next`.
        """
        self._shown = "standard input" if name == "-" else name
        self._as_json, self._targets = targets or name.endswith(".jsonl"), targets
        self._optional, self._blank = optional, blank
        data = _opened(name)
        is_file = stat.S_ISREG(os.fstat(data.fileno()).st_mode)
        # A pipe is not waited for, not even for a byte order mark.
        self._encoding = encoding or ("UTF-16" if is_file and data.peek(2)[:2] in UTF_16 else "")
        self._file = io.TextIOWrapper(data, self._encoding or BYTES)
        self._prompts, self.count = self._read(), None
        if is_file:
            begin = self._file.tell()
            self.count = sum(1 for _ in self._numbered())
            self._file.seek(begin)
        else:
            self._prompts = ReadAhead(self._prompts)

    def __next__(self) -> Line:
        return next(self._prompts)

    def ready(self) -> bool:
        """Whether the next prompt, or the end, can be read without waiting."""
        return not isinstance(self._prompts, ReadAhead) or self._prompts.ready()

    @property
    def waited(self) -> float:
        """Seconds spent waiting for a pipe or a terminal."""
        return self._prompts.waited if isinstance(self._prompts, ReadAhead) else 0.0

    def _read(self) -> Iterator[Line]:
        with self._file:
            for n, line in self._numbered():
                where, self._fields = f"{self._shown} line {n}", dict[str, Any]()
                try:
                    if len(line) > LONGEST_LINE:
                        raise UserError(f"{where} {TOO_LONG}")
                    yield self._of(line, where)
                except UserError as error:
                    bad = LineError(str(error))
                    bad.fields = self._fields
                    yield bad

    def _of(self, line: bytes, where: str) -> str | tuple[str, str | None]:
        if self._as_json and not line:
            return _checked("", where)
        text = _text(line, where)
        if not self._as_json:
            prompt = _checked(text, where, self._blank)
            return (prompt, None) if self._optional else prompt
        record = _record(text, where)
        read = ("prompt", "target") if self._targets else ("prompt", self._optional)
        self._fields = {name: value for name, value in record.items() if name not in read}
        required = read if self._targets else read[:1]
        for name in required:
            if not isinstance(record.get(name), str):
                example = ", ".join(f'"{name}": "…"' for name in required)
                raise UserError(f"{where} has no {name}; write {{{example}}}")
        prompt = Prompt(_checked(record["prompt"], where, self._blank))
        prompt.fields = self._fields
        if self._optional:
            second = record.get(self._optional)
            if second is not None and not (isinstance(second, str) and second.strip()):
                kind = "empty" if isinstance(second, str) else "no text"
                raise UserError(f"{where} has a {self._optional} that is {kind}; leave it out")
            return prompt, None if second is None else _checked(second, where)
        return (prompt, _checked(record["target"], where)) if self._targets else prompt

    def _lines(self) -> Iterator[str]:
        """Yields lines with their ends; of a line that is too long, only its beginning."""
        while line := self._file.readline(LONGEST_LINE + 1):
            yield line
            while len(line) > LONGEST_LINE and not line.endswith("\n"):
                line = self._file.readline(LONGEST_LINE + 1)

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yields lines with numbers; blank lines are b"", but those at the end are left out."""
        blank = n = 0
        try:
            for n, line in enumerate(self._lines(), 1):
                if not line.strip(string.whitespace):
                    blank += 1
                    continue
                yield from ((missing, b"") for missing in range(n - blank, n))
                blank = 0
                yield n, line.removesuffix("\n").encode("utf-8" if self._encoding else BYTES)
        except UnicodeError:
            raise UserError(f"{self._shown} is not {self._encoding.upper()}; {SAVE}") from None
        if blank == n:
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


def _checked(text: str, where: str, blank: bool = False) -> str:
    if not (blank or text.strip()):
        raise UserError(f"{where} is empty; write what the model is to work on")
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line, or \ud800 in JSON
        raise UserError(f"{where} is not valid Unicode; give it as UTF-8") from None
    return text


class ReadAhead(Iterator[Any]):
    """An iterator that reads a bounded number of items ahead, in a thread, and passes errors on."""

    def __init__(self, items: Iterable[Any], ahead: int = 64) -> None:
        self._drawn: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self.waited = 0.0  # seconds for which `next` has waited
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
