"""`startup`: how long the commands take until they show something.

Each runs in a process of its own, in an empty folder, so that the bundled pair is taken: `--help`
until the process has ended, main.py until the first characters of its default prompt's translation
are there, server.py until it says that it serves. What else is installed may count (transformers
imports torch where it finds it), so several interpreters can be compared, and several checkouts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from backend import UserError, cpu_only
from benchmarks import options, report
from benchmarks.timing import WARM_UP, order, spread

ROOT = Path(__file__).parent.parent
# Arguments → what they have to write until the clock stops; None: they have to end.
COMMANDS = MappingProxyType(
    {
        "main.py --help": None,
        "server.py --help": None,
        "convert.py --help": None,
        "benchmark.py --help": None,
        "main.py": rb"\nprompt: .*\n.",
        "server.py --port 0": rb"serving .* at http",
    }
)
_PACKAGES = "import sysconfig as s; print(s.get_path('stdlib')); print(s.get_path('purelib'))"


def seconds(command: Sequence[str], shown: bytes | None, folder: str) -> float:
    """Wall clock from starting a program until it has shown something, or has ended.

    Args:
        command: the program and its arguments.
        shown: a regular expression, looked for in what it writes; None waits for its end.
        folder: where to run it.

    Raises:
        UserError: it failed, or ended without showing that.
    """
    written, found = b"", None
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
    ) as process:
        while not found and (piece := os.read(process.stdout.fileno(), 1 << 16)):
            written += piece
            found = shown and re.search(shown, written)
        if not found:
            process.wait()
        taken = time.perf_counter() - began
        process.terminate()
        process.stdout.read()  # or it could wait for a reader for ever
    if not found and (shown or process.returncode):
        last = written.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"{' '.join(command)} did not start: {last.removeprefix('error: ')}")
    return taken


def forget(folders: Sequence[str | Path]) -> None:
    """Lets the system drop the files of these folders from memory, unless they are in use."""
    for file in (file for folder in folders for file in Path(folder).rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add = parser.add_argument
    add(
        "--python",
        nargs="+",
        default=[sys.executable],
        metavar="FILE",
        help="interpreters to compare, each with its own packages (default: this one)",
    )
    add(
        "--project",
        nargs="+",
        default=[str(ROOT)],
        metavar="FOLDER",
        help="checkouts of this project to compare (default: this one)",
    )
    add(
        "--command",
        nargs="+",
        choices=COMMANDS,
        default=list(COMMANDS),
        metavar="COMMAND",
        help=f"some of {', '.join(map(repr, COMMANDS))} (default: all)",
    )
    add(
        "--cold",
        action="store_true",
        help="before each start, let the system forget the files of the packages and the project "
        "(Linux; not those that a running program uses)",
    )
    options.add_measuring(parser, 7)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints the table."""
    if args.cold and not hasattr(os, "posix_fadvise"):
        raise UserError("--cold: this system cannot be told to forget files; leave it out")
    report.check_writable(args.json)
    taken = measure(args.command, args.python, args.project, args.cold, args.repeats)
    dtype = "float32" if cpu_only() else "the model's"
    facts = report.environment(dtype, ["transformers"])
    print(report.header(facts, command, repeats=args.repeats))
    print("seconds: median (fastest to slowest)\n")
    places = list(dict.fromkeys((python, project) for _, python, project in taken))
    columns = {"": lambda name: name} | {
        _title(place, args): lambda name, place=place: str(spread(taken[(name, *place)]))
        for place in places
    }
    print(report.markdown(columns, args.command))
    runs = [
        {"command": name, "python": python, "project": project, "seconds": times}
        for (name, python, project), times in taken.items()
    ]
    report.write_json(args.json, {"command": command, "environment": facts, "runs": runs})
    return 0


def measure(
    commands: Sequence[str],
    pythons: Sequence[str],
    projects: Sequence[str],
    cold: bool,
    repeats: int,
) -> dict[tuple[str, str, str], list[float]]:
    """Seconds of each command with each interpreter and checkout, taking turns.

    Raises:
        UserError: a command does not start.
    """
    taken = {(name, py, project): [] for name in commands for py in pythons for project in projects}
    packages = {py: _packages(py) for py in pythons}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(WARM_UP, repeats):
            for key in order(list(taken), repeat, 0):
                name, python, project = key
                if cold:
                    forget([*packages[python], project])
                file, *rest = name.split()
                # An absolute path, but no other file: that of a virtual environment is a link.
                argv = [os.path.abspath(python), str(Path(project).resolve() / file), *rest]
                once = seconds(argv, COMMANDS[name], folder)
                if repeat != WARM_UP:
                    taken[key].append(once)
    return taken


def _packages(python: str) -> list[str]:
    """Where an interpreter's modules are."""
    try:
        shown = subprocess.run([python, "-c", _PACKAGES], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--python {python}: {error.strerror}; name an interpreter") from None
    return shown.stdout.split("\n")[:2]


def _title(place: tuple[str, str], args: argparse.Namespace) -> str:
    """What a column is called: as little as tells it from the others."""
    several = (len(args.python) > 1, len(args.project) > 1)
    return " ".join(part for part, named in zip(place, several, strict=True) if named) or "here"
