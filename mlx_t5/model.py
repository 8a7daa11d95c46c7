"""In a checkout this is the root's model.py, which a wheel has here (pyproject.toml)."""

from typing import TYPE_CHECKING

from mlx_t5.installation import become_root_module

if TYPE_CHECKING:
    from model import *  # noqa: F403
    from model import T5 as T5
    from model import load as load

become_root_module("model")
