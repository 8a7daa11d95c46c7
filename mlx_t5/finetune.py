"""Command line: fine-tunes a T5, or adapters for it, on pairs of a prompt and a completion."""

from mlx_t5.starting import start


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return start("finetune", argv)


if __name__ == "__main__":
    raise SystemExit(main())
