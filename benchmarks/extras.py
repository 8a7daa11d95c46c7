"""Packages that only some measurements need, imported when they do."""

from __future__ import annotations

import importlib
from types import ModuleType

from mlx_t5.errors import UserError

REQUIREMENTS = "requirements/benchmark.txt"


def needed(name: str) -> ModuleType:
    """The module of this name.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = str(error).split("\n")[0]
        message = f"{name} cannot be imported ({reason}); pip install -r {REQUIREMENTS}"
        raise UserError(message) from None
