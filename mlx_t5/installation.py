"""What differs between a checkout and an installed package: files, commands and requirements."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parent
IN_CHECKOUT = (PACKAGE.parent / "requirements" / "common.txt").is_file()
HOME = PACKAGE.parent if IN_CHECKOUT else PACKAGE  # has demo/, the bundled pair
# Converted models are here, or else in the checkout's models/.
_chosen = os.environ.get("T5_MODELS")
MODELS = Path(_chosen).expanduser().absolute() if _chosen else Path("models")
ALL_COMMANDS = ("mlx-t5", "python -m mlx_t5")  # start a command by its name


def command(name: str) -> str:
    """How to start a command in the way in which the running one was started.

    For example "python main.py", "mlx_t5.generate", "python -m mlx_t5.generate", "mlx-t5 generate".
    """
    running = sys.argv[0] if sys.argv else ""
    starter = running.rpartition(" ")[0]
    if starter in ALL_COMMANDS:
        return f"{starter} {name}"
    if Path(running).resolve().parent == PACKAGE:
        return f"python -m mlx_t5.{name}"
    if Path(running).name.startswith("mlx_t5.") or not IN_CHECKOUT:
        return f"mlx_t5.{name}"
    return f"python {'main' if name == 'generate' else name}.py"


def cure(package: str) -> str:
    """The command that installs a missing package, and what else its command needs."""
    return f"pip install {_listed(package)}" if IN_CHECKOUT else _declared(package)


def _listed(package: str) -> str:
    folder, file = HOME / "requirements", HOME / "requirements.txt"
    for optional in (folder / "server.txt", folder / "benchmark.txt"):
        names = re.findall(r"^[\w-]+", optional.read_text("utf-8"), re.MULTILINE)
        if package.replace("_", "-") in (name.replace("_", "-") for name in names):
            file = optional
    here = Path("requirements")
    is_here = here.is_dir() and here.samefile(folder)
    return f"-r {shlex.quote(str(file.relative_to(HOME) if is_here else file))}"


def _declared(package: str) -> str:
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(line) for line in metadata.requires("mlx-t5") or ()]
    except metadata.PackageNotFoundError:  # the package was copied, not installed
        declared = []
    plain, *extras = (
        [r for r in declared if r.marker is None or r.marker.evaluate({"extra": extra})]
        for extra in ("", "cpu", "cuda13", "server", "benchmark", "ray")
    )
    groups = [[r] for r in plain if r.name.replace("-", "_") == package]
    if not groups:
        groups = [[r for r in extra if r not in plain] for extra in extras]
        groups = [g for g in groups if any(r.name.replace("-", "_") == package for r in g)]
    ways = []
    for group in groups:
        for requirement in group:
            requirement.marker = None
        ways.append(f"pip install {shlex.join(map(str, group))}")
    return " or ".join(ways) or "install this package again, with its requirements"


def imported_late(module: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`, which imports a name from its module when it is first used."""

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(where[name]), name)

    return get


def root_module(name: str) -> ModuleType:
    """The module of the checkout's root that a wheel has in the package.

    It is imported under its name in the root, so that `model` and `mlx_t5.model` are the same
    module, unless that name leads to another file, such as a user's own model.py.
    """
    file = PACKAGE.parent / f"{name}.py"
    spec = importlib.util.find_spec(name)
    if spec and spec.origin and Path(spec.origin).resolve() == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"{__package__}.{name}", file)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
