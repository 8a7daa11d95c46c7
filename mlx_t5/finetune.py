"""Command line: fine-tunes a T5, or adapters for it, on pairs of a prompt and a completion."""

from mlx_t5.cli.finetune_options import read_finetune_options
from mlx_t5.cli.training import resumable


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return resumable("finetune", argv, read_finetune_options)


if __name__ == "__main__":
    raise SystemExit(main())
