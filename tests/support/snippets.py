"""Reads the snippets of a Markdown page and runs them as a reader would, in this process.

A ```bash or ```python block may be followed by a ```text block with its output. A comment
`<!-- not run: reason -->` right above a block says that a test cannot run it. Blocks of a page run
in order in one empty folder, and Python blocks share their names.

Commands of the project run in this process; other commands run in the shell. The text of a
command's output is compared exactly, except figures of timings and lines on standard error that
the page leaves out.
"""

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from unittest import mock

import pytest

import main

ROOT = Path(main.__file__).resolve().parent
HOME = "/home/me/t5-mlx"  # this repository's folder at the reader of a page
FENCE = re.compile(r"^```(\w*)$")
INSTALL = re.compile(r"^pip install -r \S+ && ")  # the tests' environment has what pages install
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
SERVER = re.compile(r"http://127\.0\.0\.1:(808\d)")

# Parts that differ between runs: times, speeds, memory, and ids and times of server answers.
TIMINGS = re.compile(r'("(?:\w+_seconds|tokens_per_second|peak_memory_bytes|created)": ?)[\d.e-]+')
NAMES = re.compile(r"\b(cmpl-|chatcmpl-)[0-9a-f]+")
NUMBER = re.compile(r"\d+(\.\d+)?( [kMG]?B\b)?")  # memory depends on the whole process


@dataclass
class Snippet:
    """One fenced block of a page.

    Attributes:
        line: the number of its first line.
        language: "bash", "python" or "text".
        code: its contents.
        expected: its output according to the page; None if the page shows none.
        not_run: the reason that a test cannot run it; None if it can.
    """

    line: int
    language: str
    code: str
    expected: str | None = None
    not_run: str | None = None


def read(page: Path) -> list[Snippet]:
    """Returns the blocks of a page; a ```text block right after a block is its output."""
    snippets: list[Snippet] = []
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    above, after = "", None  # the last line that was not blank, and the block that it closed
    for number, line in lines:
        fence = FENCE.match(line)
        if fence:
            code = "\n".join(takewhile(lambda inner: inner != "```", (inner for _, inner in lines)))
            if fence[1] == "text" and after:
                after.expected, after = code, None
            else:
                reason = NOT_RUN.match(above)
                after = Snippet(number, fence[1], code, not_run=reason and reason[1])
                snippets.append(after)
            above = line
        elif line:
            above, after = line, None
    return snippets


class Session:
    """Runs the blocks of one page.

    Attributes:
        folder: the working folder of all commands.
        names: what the Python blocks have defined.
    """

    def __init__(self, folder: Path, server: Callable[[str], str]) -> None:
        """Starts in an empty folder.

        Args:
            folder: the working folder; the bundled pair is linked into it.
            server: returns the address of the server that replaces the page's server at a port.
        """
        self.folder, self._server, self.names = folder, server, {}
        for name in ("demo", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)

    def run(self, snippet: Snippet) -> tuple[str, str]:
        """Runs a block; returns what it writes to standard output and to standard error."""
        code = SERVER.sub(lambda match: self._server(match[1]), snippet.code)
        if snippet.language == "python":
            with self._streams() as streams:
                exec(compile(code, "snippet", "exec"), self.names)
            return tuple(map(self._captured, streams))
        lines = code.replace("\\\n", " ").splitlines()
        outputs, errors = zip(*map(self._command, lines), strict=True)
        return "".join(outputs), "".join(errors)

    def check(self, snippet: Snippet) -> None:
        """Runs a block and compares what it prints with what the page says."""
        output, errors = self.run(snippet)
        if snippet.expected is not None:
            expected = without(snippet.expected, errors)
            message = f"it prints\n\n{output}{errors}\nand not\n\n{expected}"
            assert plain(expected) == plain(output), message

    def _command(self, line: str) -> tuple[str, str]:
        """Runs one line; the last command of a pipe may be a command of the project."""
        before, _, last = INSTALL.sub("", line).rpartition(" | ")
        words = shlex.split(last, comments=True)
        variables = {}
        while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
            variables |= [words.pop(0).split("=", 1)]
        if not (len(words) > 1 and words[0] == "python" and words[1].endswith(".py")):
            how = {"cwd": self.folder, "capture_output": True, "text": True, "timeout": 60}
            completed = subprocess.run(["sh", "-c", line], **how)
            assert completed.returncode == 0, completed.stderr
            return completed.stdout, completed.stderr
        piped = self._command(before)[0] if before else ""
        with self._streams(piped, variables) as (output, errors):
            try:
                status = import_module(words[1].removesuffix(".py")).main(words[2:])
            except SystemExit as end:
                status = end.code
        assert status == 0, self._captured(errors)
        return self._captured(output), self._captured(errors)

    @contextmanager
    def _streams(self, piped: str = "", variables: dict[str, str] | None = None) -> Iterator[tuple]:
        """Runs the code of a `with` block in the session's folder and collects its output."""
        input_file = self.folder / ".stdin"
        input_file.write_text(piped, encoding="utf-8")
        output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with (
            mock.patch.dict(os.environ, variables or {}),
            pytest.MonkeyPatch.context() as patch,
            input_file.open(encoding="utf-8") as stdin,
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            patch.chdir(self.folder)
            patch.setattr(sys, "stdin", stdin)
            yield output, errors

    def _captured(self, stream: io.TextIOWrapper) -> str:
        """Returns the text of a stream, with the reader's folders instead of the test's folders."""
        stream.flush()
        text = stream.buffer.getvalue().decode()
        return text.replace(f"{ROOT}/", "").replace(str(self.folder.resolve()), HOME)


def without(expected: str, errors: str) -> str:
    """Returns the expected lines that are not on standard error, regardless of figures."""
    logged = {NUMBER.sub("#", line) for line in errors.splitlines()}
    lines = [line for line in expected.splitlines() if NUMBER.sub("#", line) not in logged]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Returns a text without the parts that differ between runs."""
    return NAMES.sub(r"\1…", TIMINGS.sub(r"\1…", text)).strip()
