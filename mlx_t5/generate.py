"""Command line: reads prompts, and writes texts and statistics (`mlx_t5.generate`, main.py)."""

from mlx_t5.starting import start


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return start("generate", argv)


if __name__ == "__main__":
    raise SystemExit(main())
