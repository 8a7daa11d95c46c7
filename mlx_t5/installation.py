"""What differs between a checkout and an installed package: files, commands and requirements."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
IN_CHECKOUT = (PACKAGE.parent / "requirements" / "common.txt").is_file()
HOME = PACKAGE.parent if IN_CHECKOUT else PACKAGE  # has demo/, the bundled pair
# Converted models are here, or else in the checkout's models/.
_chosen = os.environ.get("T5_MODELS")
MODELS = Path(_chosen).expanduser().absolute() if _chosen else Path("models")


def command(name: str) -> str:
    """How to start a command in the way in which the running one was started.

    For example "python main.py", "mlx_t5.generate", "python -m mlx_t5.generate", "mlx-t5 generate".
    """
    running = sys.argv[0] if sys.argv else ""
    starter = running.rpartition(" ")[0]
    if starter in ("mlx-t5", "python -m mlx_t5"):
        return f"{starter} {name}"
    if Path(running).resolve().parent == PACKAGE:
        return f"python -m mlx_t5.{name}"
    if Path(running).name.startswith("mlx_t5.") or not IN_CHECKOUT:
        return f"mlx_t5.{name}"
    return f"python {'main' if name == 'generate' else name}.py"


def cure(package: str) -> str:
    """How to install a missing package, with the others of its requirements file or extra."""
    name = package.replace("_", "-")
    if IN_CHECKOUT:
        folder = HOME / "requirements"
        for file in (folder / "server.txt", folder / "benchmark.txt", HOME / "requirements.txt"):
            if re.search(
                rf"^{name}[<=>[]", file.read_text("utf-8").replace("_", "-"), re.MULTILINE
            ):
                break
        return f"pip install -r {shlex.quote(os.path.relpath(file))}"
    from importlib import metadata  # slow to import, as is the next

    from packaging.requirements import Requirement

    groups: dict[str, list[Requirement]] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):  # the package was only copied
        for requirement in map(Requirement, metadata.requires("mlx-t5") or ()):
            extra = "".join(re.findall(r"extra == .(\w+)", str(requirement.marker)))
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                requirement.marker = None
                groups.setdefault(extra or requirement.name, []).append(requirement)
    fitting = [g for g in groups.values() if name in [r.name.replace("_", "-") for r in g]]
    ways = [f"pip install {shlex.join(map(str, group))}" for group in fitting]
    return " or ".join(ways) or "install this package again, with its requirements"


def require_packages(*names: str) -> None:
    """Ends the process with one line if a package is missing, also in a user's own script."""
    for name in names:
        spec = None
        with contextlib.suppress(ValueError):  # sys.modules has None for it
            spec = importlib.util.find_spec(name)
        if spec is None:
            print(f"error: {name} is not installed; {cure(name)}", file=sys.stderr)
            sys.exit(2)


def become_root_module(name: str) -> None:
    """Makes `mlx_t5.NAME` the module of the checkout's root that a wheel has in the package.

    It is the same module as `NAME`, unless that name leads to another file, such as a user's own
    model.py.
    """
    file, own = PACKAGE.parent / f"{name}.py", f"{__package__}.{name}"
    found = importlib.util.find_spec(name)
    if found and found.origin and Path(found.origin).resolve() == file:
        sys.modules[own] = importlib.import_module(name)
    else:
        exec(compile(file.read_bytes(), file, "exec"), vars(sys.modules[own]))
