"""What the command line reads and what it shows: prompts in; texts and colours out.

Prompts and results are UTF-8. Nothing here knows about MLX, so that bad input is refused before
any model is loaded.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import stat
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from read_ahead import ReadAhead

if TYPE_CHECKING:
    from results import Result
    from text import StreamingDetokenizer

BYTES = "latin-1"  # the encoding in which every byte is a character


class Parser(argparse.ArgumentParser):
    """Reports every mistake as one line that starts with `error:`."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        message = " ".join(message.removeprefix("argument ").split())
        if message.startswith("unrecognized"):
            message += "; see --help"
        self.exit(2, f"error: {message}\n")


class InputError(ValueError):
    """Input that cannot be used; the message is the one line that the user reads."""


def not_installed(error: ImportError, requirements: str = "requirements.txt") -> str:
    """What to tell whoever starts a command without the packages that it needs."""
    reason = str(error).strip().split("\n")[0].rstrip(".:")
    if isinstance(error, ModuleNotFoundError) and error.name:
        reason = f"{error.name.partition('.')[0]} is not installed"
    return f"{reason}; pip install -r {requirements}"


def open_streams() -> None:
    """Makes the standard streams fit for use: no name fails there, and a closed one is empty.

    A closed one must not stay so: the next file opened would take its place, and get what C
    libraries write there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of files may be no Unicode; "\\udce9" is what JSON writes for such a byte too.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


# ---- prompts in ----------------------------------------------------------------------------------


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """Prompts as given; "-" stands for the whole of standard input.

    Raises:
        InputError: one is empty, or no text.
    """
    return [_read_prompt(prompt) for prompt in prompts]


def _read_prompt(given: str) -> str:
    if given != "-":
        return _checked(given, "the prompt")
    return _decoded(sys.stdin.buffer.read().rstrip(b"\r\n"), "standard input")


class Lines:
    """A file's prompts, line by line as they are asked for, so that any file fits into memory.

    In the place of a line that cannot be used stands the reason. A line ends with LF, CRLF or CR;
    blank lines at the end are none. What can be read only once, such as a pipe, is read ahead.

    Attributes:
        count: how many prompts there are; None where that shows only at the end.
    """

    def __init__(self, name: str) -> None:
        """Opens the file.

        Args:
            name: one prompt a line, or objects with a "prompt" where the name ends in .jsonl; "-"
                is standard input, one prompt a line.

        Raises:
            InputError: the file cannot be read, or has no line; where it cannot be counted, the
                latter is raised by the first `next`.
        """
        self._shown = "standard input" if name == "-" else name
        self._as_json = name.endswith(".jsonl")
        self._file = _opened(name)
        self._prompts, self.count = self._read(), None
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            begin = self._file.tell()
            self.count = sum(1 for _ in self._numbered())
            self._file.seek(begin)
        else:
            self._prompts = ReadAhead(self._prompts)

    def __iter__(self) -> Iterator[str | InputError]:
        return self

    def __next__(self) -> str | InputError:
        return next(self._prompts)

    def ready(self) -> bool:
        """Whether the next prompt, or the end, is there without waiting for whoever writes it."""
        return not isinstance(self._prompts, ReadAhead) or self._prompts.ready()

    def _read(self) -> Iterator[str | InputError]:
        with self._file:
            for n, line in self._numbered():
                where = f"{self._shown} line {n}"
                try:
                    yield _decoded(line, where, self._as_json) if line else _checked("", where)
                except InputError as error:
                    yield error

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        """Lines as they are in the file, without those blank at the end; b"" stands for blank."""
        blank = n = 0
        try:
            for n, line in enumerate(self._file, 1):
                if not line.strip(string.whitespace):
                    blank += 1
                    continue
                yield from ((missing, b"") for missing in range(n - blank, n))
                blank = 0
                yield n, line.removesuffix("\n").encode(BYTES)
        except OSError as error:
            raise InputError(f"cannot read {self._shown}: {error.strerror}") from None
        if blank == n:
            raise InputError(f"{self._shown} is empty; write one prompt a line")


def _opened(name: str) -> TextIO:
    """A file whose characters are its bytes, so that only the ends of lines are interpreted."""
    try:
        if name != "-":
            return open(name, encoding=BYTES)
        # Not sys.stdin itself: a thread that waits in it would break the end of the process.
        return open(sys.stdin.fileno(), encoding=BYTES, closefd=False)
    except FileNotFoundError:
        raise InputError(f"there is no file {name}; check the path") from None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None


def _decoded(data: bytes, where: str, as_json: bool = False) -> str:
    try:
        if b"\0" in data:  # as in UTF-16
            raise ValueError("binary")
        text = data.decode("utf-8-sig")
    except ValueError:
        raise InputError(f"{where} is not UTF-8; save the text as UTF-8") from None
    return _checked(_prompt_of(text, where) if as_json else text, where)


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError):  # what Python's limits refuse
        limits = "a number is too long or the nesting too deep"
        raise InputError(f"{where} is JSON that cannot be read ({limits})") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise InputError(f'{where} has no prompt; write {{"prompt": "…"}}')
    return record["prompt"]


def _checked(text: str, where: str) -> str:
    if not text.strip():
        raise InputError(f"{where} is empty; write what the model is to work on")
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line, or \ud800 in JSON
        raise InputError(f"{where} is not valid Unicode; give it as UTF-8") from None
    return text


def check_output(output_file: str, input_file: str | None) -> None:
    """See before the work begins that its results can be written.

    Raises:
        InputError: the folder is missing or closed, or the file is the input itself.
    """
    path = Path(output_file)
    if path.is_dir():
        raise InputError(f"{output_file} is a folder; name a file for the results")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{output_file} may not be written; choose another place")
    if input_file not in (None, "-") and path.exists() and path.samefile(input_file):
        raise InputError(f"{output_file} is the input file too; give the results another name")


# ---- texts out -----------------------------------------------------------------------------------


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
        """Text coloured token by token.

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
        left = len(result.text)  # the tokens of a stop string are not shown
        for i, piece in enumerate(pieces):
            pieces[i] = piece[:left]
            left -= len(pieces[i])
        return one_line(self.paint(pieces[:-1], result.writers, pieces[-1]))


class Results:
    """Writes finished results in order, each flushed, so that an interruption loses none.

    Args:
        path: file to write, left as it is until there is a result; None is standard output.
        as_json: one JSON object a line; otherwise one text a line.
        paint: makes a coloured line of a result; where results go to a file or are JSON, it is
            shown on standard error besides.
    """

    def __init__(
        self, path: str | None, as_json: bool, paint: Callable[[Result], str] | None = None
    ):
        self._path, self._file = path, None if path else sys.stdout
        self._as_json, self._paint = as_json, paint
        self._aside = path is not None or as_json

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_) -> None:
        if self._path and self._file:
            self._file.close()

    def write(self, prompt: str, result: Result) -> None:
        """Write one result; an empty line, or JSON with the error, where there is no text."""
        paint = None if result.error else self._paint
        line = json_line(prompt, result) if self._as_json else one_line(result.text or "")
        if paint and self._aside:
            print(paint(result), file=sys.stderr)
        elif paint:
            line = paint(result)
        self._file = self._file or open(
            self._path, "w", encoding="utf-8", errors="backslashreplace"
        )
        print(line, file=self._file, flush=True)


def one_line(text: str) -> str:
    r"""A text on one line: a line break in it is written as the two characters `\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", r"\n")


def json_line(prompt: str, result: Result) -> str:
    """The object that `--json` promises to scripts."""
    record = {
        "prompt": prompt,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": asdict(result.stats),
    }
    if result.error:
        record["error"] = result.error
    return json.dumps(record, ensure_ascii=False)
