"""Command line: reads prompts, and writes texts and statistics (`mlx_t5.generate`, main.py)."""

from mlx_t5.cli.arguments import run, run_body
from mlx_t5.cli.generate_options import read_command_line


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return run(lambda: run_body("generate", read_command_line(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
