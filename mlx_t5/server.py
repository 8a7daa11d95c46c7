"""Command line: serves a model through an HTTP API and a web page."""

import os

from mlx_t5.cli.arguments import run, run_body
from mlx_t5.cli.server_options import read_server_options


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return run(lambda: run_body("server", read_server_options(argv)), interrupted="")


def run_and_exit() -> None:
    # Not sys.exit: if a thread still loads models, it would abort in MLX or never return.
    os._exit(main())


if __name__ == "__main__":
    run_and_exit()
