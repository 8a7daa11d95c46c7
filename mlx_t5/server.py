"""Command line: serves a model through an HTTP API and a web page."""

import os

from mlx_t5.cli.server import main


def start() -> None:
    # Not sys.exit: if a thread still loads models, it would abort in MLX or never return.
    os._exit(main())


if __name__ == "__main__":
    start()
