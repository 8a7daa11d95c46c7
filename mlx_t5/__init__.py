"""T5 in MLX with speculative decoding: `load`, `SpeculativeDecoder` and the model, `T5`.

>>> decoder = SpeculativeDecoder.from_pretrained("demo/target")  # a folder, or a Hub id
>>> decoder.generate("fix grammar: She have two cat.").text
'She has two cats.'

`help` of each of the three has its arguments.
"""

# Every program imports this package first.

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would delay the first answer to Ctrl-C
__version__ = "0.1.0"
__all__ = ["T5", "SpeculativeDecoder", "__version__", "load"]

if sys.version_info < (3, 10):  # noqa: UP036  (Apple's own python3 is 3.9)
    print("error: this needs Python 3.10 or later; make .venv with a newer one", file=sys.stderr)
    sys.exit(2)

if TYPE_CHECKING:
    from typing import Any

    from mlx_t5.decoder import SpeculativeDecoder
    from mlx_t5.model import T5, load


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlx_t5 import decoder, model  # only now, so that the import alone does not wait for MLX

    return getattr(decoder if name == "SpeculativeDecoder" else model, name)
