"""Command line: fine-tunes a T5, or adapters for it, on pairs of a prompt and a completion."""

import sys

from mlx_t5.cli.finetune import main

if __name__ == "__main__":
    sys.exit(main())
