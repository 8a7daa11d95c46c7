"""Command line: converts a Hugging Face T5 checkpoint into an MLX model folder."""

import sys

from mlx_t5.cli.convert import convert as convert
from mlx_t5.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
