"""Reads the snippets of a Markdown page and runs them as a reader would, in this process.

A ```bash or ```python block may be followed by a ```text block with its output. A comment
`<!-- not run: reason -->` right above a block says that a test cannot run it. Blocks of a page run
in order in one empty folder, and Python blocks share their names.

Commands of the project run in this process; other commands run in the shell. The text of a
command's output is compared exactly, except figures of timings and lines on standard error that
the page leaves out.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import main

ROOT = Path(main.__file__).resolve().parent
HOME = "/home/me/t5-mlx"  # this repository's folder at the reader of a page
PROGRAMS = ("main", "convert", "server", "benchmark", "distill", "finetune", "demo.grow")
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
            block = []
            for _, inner in lines:
                if inner == "```":
                    break
                block.append(inner)
            code = "\n".join(block)
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


def commands(code: str) -> Iterator[list[str]]:
    """Yields the words of each command of a ```bash block, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


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
        code = SERVER.sub(lambda found: self._server(found[1]), snippet.code)
        return self._python(code) if snippet.language == "python" else self._bash(code)

    def check(self, snippet: Snippet) -> None:
        """Runs a block and compares what it prints with what the page says."""
        output, errors = self.run(snippet)
        if snippet.expected is not None:
            expected = without(snippet.expected, errors)
            if plain(expected) != plain(output):
                raise AssertionError(f"it prints\n\n{output}{errors}\nand not\n\n{expected}")

    def _python(self, code: str) -> tuple[str, str]:
        with self._streams() as (output, errors):
            exec(compile(code, "snippet", "exec"), self.names)
        return self._captured(output), self._captured(errors)

    def _bash(self, code: str) -> tuple[str, str]:
        outputs, errors = [], []
        for line in code.replace("\\\n", " ").splitlines():
            output, error = self._command(line)
            outputs.append(output)
            errors.append(error)
        return "".join(outputs), "".join(errors)

    def _command(self, line: str) -> tuple[str, str]:
        """Runs one line; the last command of a pipe may be a command of the project."""
        before, _, last = INSTALL.sub("", line).rpartition(" | ")
        words = shlex.split(last, comments=True)
        variables = {}
        while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if not (len(words) > 1 and words[0] == "python" and words[1].endswith(".py")):
            completed = subprocess.run(
                ["sh", "-c", line], cwd=self.folder, capture_output=True, text=True, timeout=60
            )
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
        folder, environment, stdin = Path.cwd(), dict(os.environ), sys.stdin
        os.environ.update(variables or {})
        os.chdir(self.folder)
        try:
            with (
                input_file.open(encoding="utf-8") as sys.stdin,
                redirect_stdout(output),
                redirect_stderr(errors),
            ):
                yield output, errors
        finally:
            sys.stdin = stdin
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)

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


def help_of(program: str, *subcommand: str) -> str:
    """Returns the help of a program."""
    output = io.StringIO()
    with redirect_stdout(output), suppress(SystemExit):
        import_module(program).main([*subcommand, "--help"])
    return output.getvalue()


def options(program: str, *subcommand: str) -> set[str]:
    """Returns the long options in a program's help."""
    return set(re.findall(r"--[a-z][\w-]*", help_of(program, *subcommand)))
