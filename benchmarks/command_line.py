"""The command line of benchmark.py: picks the subcommand and turns errors into one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from backend import UserError
from benchmarks import report
from console import Parser

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
SUBCOMMANDS = ("compare", "speed", "sweep", "peers", "stopping", "quantize", "memory", "server")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Returns:
        Exit status: 0; 1 if texts differ that have to be equal; 2 for bad input; 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(argv)
    try:
        return args.run(args, report.command(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def parser() -> Parser:
    """All subcommands and their options."""
    result = Parser(prog="benchmark.py", description="Measures speculative decoding.")
    commands = result.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name in SUBCOMMANDS:
        module = importlib.import_module(f"benchmarks.{name}")
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.__doc__, allow_abbrev=False
        )
        module.add_options(command)
        command.set_defaults(run=module.run)
    return result
