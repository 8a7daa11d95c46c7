"""In a checkout this is the root's model.py, which a wheel has here (pyproject.toml)."""

import sys
from typing import TYPE_CHECKING

from mlx_t5.installation import root_module

if TYPE_CHECKING:
    from model import *  # noqa: F403
    from model import T5 as T5
    from model import load as load

sys.modules[__name__] = root_module("model")
