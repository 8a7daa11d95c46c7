"""What differs between a checkout and an installed package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent


def root_module(name: str) -> ModuleType:
    """The module of the checkout's root that a wheel puts into the package.

    It is imported under its name in the root, so that `model` and `mlx_t5.model` are the same
    module, unless that name leads to another file, such as a user's own model.py.
    """
    file = CHECKOUT / f"{name}.py"
    spec = importlib.util.find_spec(name)
    if spec and spec.origin and Path(spec.origin).resolve() == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"{__package__}.{name}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
