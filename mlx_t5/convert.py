"""Command line: converts a Hugging Face T5 checkpoint into an MLX model folder.

The function is `from mlx_t5.convert import convert`.
"""

from __future__ import annotations

from mlx_t5 import TYPE_CHECKING
from mlx_t5.starting import start

if TYPE_CHECKING:
    from typing import Any

    from mlx_t5.cli.convert_command import convert as convert


def __getattr__(name: str) -> Any:
    if name != "convert":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlx_t5.cli import convert_command  # only now, because it imports MLX

    return convert_command.convert


def main(argv: list[str] | None = None) -> int:
    """Runs the command line, by default the process's own; returns the exit status."""
    return start("convert", argv)


if __name__ == "__main__":
    raise SystemExit(main())
