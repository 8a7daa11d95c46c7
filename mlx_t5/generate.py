"""Command line: reads prompts, and writes texts and statistics."""

import sys

from mlx_t5.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
