"""Measures once what passes of a model cost on this machine, and remembers it in a file.

A model's curve is taken over passes of 1 to 128 positions of one row: a staircase on most devices,
as kernels work on several rows at a time, so the places that are measured lie close together where
choices are made. The points that matter most come first. A model so large that there is no time
for all of them gets by with the first ones, at least two; a small one has each measured several
times, and the least counts, as whatever else the machine does only adds to it.

The file is one a model, in $XDG_CACHE_HOME or ~/.cache. Its name is a hash of everything that the
curve depends on: the model's config, the types and shapes of its parameters, the device and the
version of MLX. Deleting it measures anew. A file that cannot be read or written is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend import device_name, mx, tree_flatten
from draft_length import Costs, Curve
from model import T5

FOLDER = "t5-mlx"
FORMAT = 1  # of the file; also to be raised when passes are measured differently
POSITIONS = (1, 6, 16, 2, 4, 11, 32, 8, 3, 5, 64, 10, 128, 12, 24, 48, 96)  # by importance
BUDGET = 0.4  # seconds a model
ROUNDS = 5  # more add nothing
SOURCE = 32  # tokens of the prompt that passes attend to
AHEAD = 4  # draft passes in a row: while drafting, nothing waits for the device


def measure_costs(
    target: T5,
    draft: T5 | None,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """The costs of a pair, from the file or measured, which takes less than a second.

    Args:
        target: the model that verifies, each pass waited for.
        draft: the model that proposes, several passes in a row; None if none does.
        folder: where the files are kept; None is the user's cache.
        clock: seconds.
    """
    folder = cache_folder() if folder is None else folder
    curves = [
        _curve(model, passes, folder, clock) if model else None
        for model, passes in ((target, 1), (draft, AHEAD))
    ]
    return Costs(*curves)


def cache_folder(environment: dict[str, str] | None = None) -> Path:
    """The folder in the user's cache."""
    environment = os.environ if environment is None else environment
    base = environment.get("XDG_CACHE_HOME", "")
    # The specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / FOLDER


def sample(
    seconds: Callable[[int], float],
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Measures the points of a curve until the budget is used up.

    Args:
        seconds: runs a pass over so many positions and says what it took.
        budget: seconds in which to do it; two points are measured even if they take longer.
        clock: seconds.
    """
    began, least = clock(), {}
    for _ in range(ROUNDS):
        for n in POSITIONS:
            if len(least) >= 2 and clock() - began + least.get(n, max(least.values())) > budget:
                return _rising(least)
            least[n] = min(seconds(n), least.get(n, math.inf))
    return _rising(least)


def _rising(least: dict[int, float]) -> Curve:
    """The curve through these points: fewer positions never cost more than more of them."""
    points, lowest = [], math.inf
    for n in sorted(least, reverse=True):
        lowest = min(lowest, least[n])
        points.append((n, lowest))
    return Curve(tuple(reversed(points)))


def read(file: Path, key: dict[str, Any]) -> Curve | None:
    """The curve in a file, None if there is none that could be used."""
    try:
        stored = json.loads(file.read_bytes())
        points = tuple((n, s) for n, s in stored["points"])
        usable = stored["key"] == key and len(points) > 1 and points[0][0] == 1
        usable &= all(type(n) is int and type(s) is float for n, s in points)
        usable &= all(math.isfinite(s) and s > 0 for _, s in points)
        usable &= all(a[0] < b[0] for a, b in zip(points, points[1:], strict=False))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Curve(points) if usable else None


def write(file: Path, key: dict[str, Any], curve: Curve) -> None:
    """Keeps a curve, if the folder can be written: whole or not at all."""
    text = json.dumps({"key": key, "points": curve.points}, indent=1)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
        try:
            with open(handle, "w", encoding="utf-8") as part:
                part.write(text)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


def identity(model: T5, passes: int) -> dict[str, Any]:
    """Everything that a model's curve depends on."""
    parameters = [(n, str(a.dtype), list(a.shape)) for n, a in tree_flatten(model.parameters())]
    return {
        "format": FORMAT,
        "passes": passes,
        "config": asdict(model.config),
        "parameters": hashlib.sha256(json.dumps(sorted(parameters)).encode()).hexdigest(),
        "dtype": str(model.shared.weight.dtype),
        "device": device_name(),
        "mlx": mx.__version__,
    }


def _curve(model: T5, passes: int, folder: Path, clock: Callable[[], float]) -> Curve:
    key = identity(model, passes)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    file = folder / f"{digest[:32]}.json"
    curve = read(file, key)
    if curve is None:
        curve = sample(_timer(model, passes, clock), clock=clock)
        write(file, key, curve)
    return curve


def _timer(model: T5, passes: int, clock: Callable[[], float]) -> Callable[[int], float]:
    """A function that times passes over n positions, `passes` in a row, each fed by the last."""
    source = mx.zeros((1, SOURCE), mx.int32)
    cache = model.cache(model.encode(source), capacity=max(POSITIONS))
    mx.eval(cache.state)

    def run(n: int) -> mx.array:
        tokens = mx.zeros((1, n), mx.int32)
        for _ in range(passes):
            tokens = mx.argmax(model.decode(tokens, cache, [0]), axis=-1).astype(mx.int32)
        return tokens

    def seconds(n: int) -> float:
        began = clock()
        mx.eval(run(n))
        return (clock() - began) / passes

    mx.eval(run(1))  # reads the weights from disk, if they have not been used yet
    return seconds
