"""Command line: measures speculative decoding, with the bundled pair of models or another.

Only the named subcommand is imported, so `--help` waits neither for MLX nor for other subcommands.
Timed runs of the compared variants alternate; see mlx_t5/timing.py.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from types import MappingProxyType

from mlx_t5.cli.arguments import Parser, add_options, run
from mlx_t5.installation import command

# A summary and the options of an example, by name.
SUBCOMMANDS = MappingProxyType(
    {
        "compare": (
            "every proposer relative to regular decoding, and the cost of passes",
            "--num-draft 4 --batch-size 1 8",
        ),
        "sweep": (
            "tune --num-draft and --delta: speed and quality over a grid, with a picture",
            "--delta 0.5 0.9 --output my-sweep",
        ),
        "peers": (
            "transformers and CTranslate2 on the same weights and prompts",
            "--batch-size 1 8 --json peers.json",
        ),
        "report": (
            "one row about this machine, to paste, in under five minutes",
            "--model my-t5 --draft-model my-draft",
        ),
        "server": (
            "the server under load: a running batch compared with one request at a time",
            "--clients 1 8 --max-batch 8",
        ),
    }
)
MODULES = {"server": "server_load"}  # of subcommands that have another name
DEFAULT = ("compare", "--ways", "draft", "--num-draft", "5", "auto")  # without a subcommand


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Returns:
        The exit status: 0 for success, 1 if texts differ that must be equal, 2 for bad input, 130
        after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or (argv[0].startswith("--") and argv[0] != "--help"):
        argv = [*DEFAULT, *argv]
    return run(lambda: _main(argv), interrupted="")


def _main(argv: Sequence[str]) -> int:
    args = _parser(argv).parse_args(argv)
    return args.run(args, f"{command('benchmark')} {shlex.join(argv)}")


def _parser(argv: Sequence[str]) -> Parser:
    """Returns the parser; of the subcommands, only the one named in `argv` gets its options."""
    result = Parser(
        "benchmark",
        "",
        "report",
        "compare --task mixed --count 24",
        needs="[SUBCOMMAND]",
        description="Measure speculative decoding. SUBCOMMAND --help lists the options of one. "
        f"Without a subcommand: {' '.join(DEFAULT)}.",
    )
    commands = result.add_subparsers(
        title="subcommands",
        prog=result.prog,
        dest="subcommand",
        required=True,
        metavar="SUBCOMMAND",
    )
    for name, (summary, options) in SUBCOMMANDS.items():
        example = f"examples:\n  {result.prog} {name} {options}"
        subcommand = commands.add_parser(name, help=summary, epilog=example)
        if name in argv:
            module = importlib.import_module(f"mlx_t5.benchmarks.{MODULES.get(name, name)}")
            subcommand.description = (module.__doc__ or "").partition("\n\n")[0]
            add_options(subcommand, module.OPTIONS)
            defaults = {option: declared.default for option, declared in module.OPTIONS.items()}
            subcommand.set_defaults(run=getattr(module, f"run_{name}"), **defaults)
    return result


if __name__ == "__main__":
    sys.exit(main())
