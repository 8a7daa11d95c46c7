"""Command line: makes a draft for a T5 from prompts alone, and measures whether it saves time."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_t5.cli.distill_options import DistillOptions, read_distill_options
from mlx_t5.cli.training import resumable


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return resumable("distill", argv, read_distill_options, _distill)


def _distill(options: DistillOptions) -> int:
    from mlx_t5.cli.distill_command import Distillation  # only now, because it imports MLX

    return Distillation(options).run()


if __name__ == "__main__":
    sys.exit(main())
