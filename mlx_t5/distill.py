"""Command line: makes a draft for a T5 from prompts alone, and measures whether it saves time."""

import sys

from mlx_t5.cli.distill import main

if __name__ == "__main__":
    sys.exit(main())
