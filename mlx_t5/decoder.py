"""In a checkout, the root's decoder.py; in a wheel, that very file stands here."""

import sys
from typing import TYPE_CHECKING

from mlx_t5.installation import root_module

if TYPE_CHECKING:
    from decoder import *  # noqa: F403

sys.modules[__name__] = root_module("decoder")
