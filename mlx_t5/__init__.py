"""T5 in MLX with speculative decoding; every program imports this package first."""

import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["T5", "SpeculativeDecoder", "__version__", "load"]

if sys.version_info < (3, 10):  # noqa: UP036  (Apple's own python3 is 3.9)
    print("error: this needs Python 3.10 or later; make .venv with a newer one", file=sys.stderr)
    sys.exit(2)

from mlx_t5.installation import imported_late

if TYPE_CHECKING:
    from mlx_t5.decoder import SpeculativeDecoder
    from mlx_t5.model import T5, load

# Neither `--help` nor the import alone waits for MLX.
_MODULES = {"SpeculativeDecoder": "mlx_t5.decoder", "T5": "mlx_t5.model", "load": "mlx_t5.model"}
__getattr__ = imported_late(__name__, _MODULES)
