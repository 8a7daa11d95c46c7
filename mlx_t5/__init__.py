"""T5 in MLX with speculative decoding; every program imports this package first."""

import sys

__version__ = "0.1.0"

if sys.version_info < (3, 10):  # noqa: UP036  (Apple's own python3 is 3.9)
    print("error: this needs Python 3.10 or later; make .venv with a newer one", file=sys.stderr)
    sys.exit(2)
