"""Command line: serves a model through an HTTP API and a web page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

from mlx_t5.cli.arguments import run
from mlx_t5.cli.server_options import ServerOptions, read_server_options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return run(lambda: _serve(read_server_options(argv)), interrupted="")


def _serve(options: ServerOptions) -> int:
    from mlx_t5.cli.server_command import serve_model  # only now, because it imports MLX

    return serve_model(options)


def run_and_exit() -> NoReturn:
    # Not sys.exit: if a thread still loads models, it would abort in MLX or never return.
    os._exit(main())


if __name__ == "__main__":
    run_and_exit()
