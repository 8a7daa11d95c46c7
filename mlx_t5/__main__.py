"""All commands by one name: `mlx-t5 COMMAND …`, or `python -m mlx_t5 COMMAND …`."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from mlx_t5 import __version__
from mlx_t5.cli.arguments import Parser

COMMANDS = {
    "generate": "write texts with a model",
    "convert": "convert a Hugging Face checkpoint into an MLX model folder",
    "server": "serve a model through an HTTP API and a web page",
    "distill": "make a draft for a model from prompts",
    "finetune": "fine-tune a model, or adapters for it",
    "benchmark": "measure speculative decoding on this machine",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names, with the arguments behind it."""
    program = "python -m mlx_t5" if Path(sys.argv[0]).name == "__main__.py" else "mlx-t5"
    parser = Parser(
        needs="COMMAND",
        prog=program,
        description="T5 in MLX, with speculative decoding. COMMAND --help lists its options.",
        epilog="commands:" + "".join(f"\n  {name:12}{COMMANDS[name]}" for name in COMMANDS),
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.error(f"name a COMMAND: {', '.join(COMMANDS)}")
    name = parser.parse_args(argv[:1]).command
    sys.argv = [f"{program} {name}", *argv[1:]]
    module = import_module(f"mlx_t5.{name}")
    return int(getattr(module, "run_and_exit", module.main)())


if __name__ == "__main__":
    sys.exit(main())
