"""Command line: makes a draft for a T5 from prompts alone, and measures whether it saves time."""

from mlx_t5.starting import start


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return start("distill", argv)


if __name__ == "__main__":
    raise SystemExit(main())
