"""Command line: converts a Hugging Face T5 checkpoint into an MLX model folder.

The function is `from mlx_t5.convert import convert`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.arguments import run
from mlx_t5.cli.convert_options import read_convert_options
from mlx_t5.installation import imported_late

if TYPE_CHECKING:
    from mlx_t5.cli.convert_command import convert as convert

__getattr__ = imported_late(__name__, {"convert": "mlx_t5.cli.convert_command"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    interrupted = "interrupted; nothing was written"
    return run(lambda: _convert(read_convert_options(argv)), interrupted)


def _convert(options: dict[str, Any]) -> int:
    from mlx_t5.cli.convert_command import convert_and_upload  # only now, because it imports MLX

    return convert_and_upload(**options)


if __name__ == "__main__":
    sys.exit(main())
