"""Command line: fine-tunes a T5, or adapters for it, on pairs of a prompt and a completion."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_t5.cli.finetune_options import FinetuneOptions, read_finetune_options
from mlx_t5.cli.training import resumable


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return resumable("finetune", argv, read_finetune_options, _finetune)


def _finetune(options: FinetuneOptions) -> int:
    from mlx_t5.cli.finetune_command import FineTuning  # only now, because it imports MLX

    return FineTuning(options).run()


if __name__ == "__main__":
    sys.exit(main())
