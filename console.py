"""What the command line reads and what it shows: prompts in; texts, colours and statistics out.

Prompts and results are UTF-8. Nothing here knows about MLX, so that bad input is refused before
any model is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from sizes import readable

if TYPE_CHECKING:
    from results import Result, Stats
    from text import StreamingDetokenizer


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


def read_lines(name: str) -> Iterator[str | InputError]:
    """A file's prompts, line by line as they are asked for, so that any file fits into memory.

    In the place of a line that cannot be used stands the reason.

    Args:
        name: one prompt a line, or objects with a "prompt" where the name ends in .jsonl; "-" is
            standard input, one prompt a line. Blank lines at the end are none.

    Raises:
        InputError: there is no line to read.
    """
    shown, blank, n = "standard input" if name == "-" else name, 0, 0
    with _opened(name) as file:
        for n, line in enumerate(file, 1):
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if not line.strip():
                blank += 1
                continue
            for missing in range(n - blank, n):
                yield _empty(f"{shown} line {missing}")
            blank = 0
            try:
                yield _decoded(line, f"{shown} line {n}", name.endswith(".jsonl"))
            except InputError as error:
                yield error
    if blank == n:
        raise InputError(f"{shown} is empty; write one prompt a line")


def count_lines(name: str) -> int | None:
    """How many prompts `read_lines` will find; None for standard input, which is read once.

    Raises:
        InputError: the file cannot be read, or has no line.
    """
    return None if name == "-" else sum(1 for _ in read_lines(name))


def _opened(name: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if name == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(name, "rb")
    except FileNotFoundError:
        raise InputError(f"there is no file {name}; check the path") from None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None


def _decoded(data: bytes, where: str, as_json: bool = False) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{where} is not UTF-8; save the text as UTF-8") from None
    return _checked(_prompt_of(text, where) if as_json else text, where)


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise InputError(f'{where} has no prompt; write {{"prompt": "…"}}')
    return record["prompt"]


def _checked(text: str, where: str) -> str:
    if not text.strip():
        raise _empty(where)
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line, or \ud800 in JSON
        raise InputError(f"{where} is not valid Unicode; give it as UTF-8") from None
    return text


def _empty(where: str) -> InputError:
    return InputError(f"{where} is empty; write what the model is to work on")


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
        self._file = self._file or open(self._path, "w", encoding="utf-8")
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


# ---- statistics ----------------------------------------------------------------------------------


def summary(stats: Sequence[Stats], seconds: float, unit: str = "prompts") -> str:
    """One line of statistics.

    Args:
        stats: those of every result.
        seconds: how long they took together.
        unit: what to call several of them.
    """
    tokens, calls = sum(s.generated_tokens for s in stats), sum(s.target_calls for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    parts = [f"{len(stats)} {unit}"] if len(stats) > 1 else []
    parts += [f"{tokens} tokens in {seconds:.2f} s", f"{tokens / max(seconds, 1e-9):.1f} tokens/s"]
    if drafted:
        parts.append(f"acceptance {accepted / drafted:.0%} ({accepted} of {drafted} drafted)")
    copied = sum(s.speculation.copied_accepted for s in stats)
    if copied:
        parts.append(f"{copied} copied")
    if calls:
        decided = sum(s.tokens_per_call * s.target_calls for s in stats)
        parts.append(f"{decided / calls:.2f} tokens per target call")
    peak = max((s.peak_memory_bytes for s in stats), default=0)
    if peak:
        parts.append(f"peak memory {readable(peak)}")
    return " · ".join(parts)
