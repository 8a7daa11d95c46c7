"""Command line: reads prompts, and writes texts and statistics (`mlx_t5.generate`, main.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_t5.cli.arguments import run
from mlx_t5.cli.generate_options import MainOptions, open_prompts, read_options
from mlx_t5.cli.output import check_output_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return run(lambda: _main(read_options(argv)))


def _main(options: MainOptions) -> int:
    prompts = open_prompts(options)
    if options.output_file:
        check_output_file(options.output_file, options.input_file, options.is_output_whole)
    from mlx_t5.cli.generate_command import generate  # only now, because it imports MLX

    return generate(options, prompts)


if __name__ == "__main__":
    sys.exit(main())
