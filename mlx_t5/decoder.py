"""In a checkout this is the root's decoder.py, which a wheel has here (pyproject.toml)."""

from typing import TYPE_CHECKING

from mlx_t5.installation import become_root_module

if TYPE_CHECKING:
    from decoder import *  # noqa: F403
    from decoder import SpeculativeDecoder as SpeculativeDecoder

become_root_module("decoder")
