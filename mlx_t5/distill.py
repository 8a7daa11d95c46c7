"""Command line: makes a draft for a T5 from prompts alone, and measures whether it saves time."""

from mlx_t5.cli.distill_options import read_distill_options
from mlx_t5.cli.training import resumable


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return resumable("distill", argv, read_distill_options)


if __name__ == "__main__":
    raise SystemExit(main())
