"""Command line: serves a model through an HTTP API and a web page."""

import os

from mlx_t5.starting import start


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return start("server", argv)


def run_and_exit() -> None:
    # Not sys.exit: if a thread still loads models, it would abort in MLX or never return.
    os._exit(main())


if __name__ == "__main__":
    run_and_exit()
