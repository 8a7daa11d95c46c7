"""How much MLX hands to a GPU at a time, and whether another limit is faster on this machine.

MLX gives operations to the GPU in command buffers (CUDA: graphs), and commits one after so many
operations, or once its inputs are so large; its "MB" are 2^20 numbers, of whatever type. It reads
both limits once a process. So another value is tried by a process of its own, which makes passes
of the same target in turns with this one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.passes import timer
from benchmarks.peer_process import Process
from convert import convert
from mlx_t5.backend import cpu_only, device_info, mx, tree_flatten
from mlx_t5.cli.models import locate
from mlx_t5.errors import UserError
from mlx_t5.network.memory import limit
from mlx_t5.timing import spread
from model import T5, load

OPS, MB = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
UNITS = MappingProxyType({OPS: "ops", MB: "MB"})
OTHERS = MappingProxyType({OPS: 1000, MB: 400})  # those of ml-explore/mlx#4521
# MLX's defaults (metal/device.cpp, cuda/device.cpp), by the last letter of a Metal architecture (p
# phone, s Max, d Ultra) or by that of a CUDA one; and those of Apple's and NVIDIA's other GPUs.
DEFAULTS = MappingProxyType(
    {"p": (20, 40), "s": (50, 50), "d": (50, 50), "sm_80": (20, 400), "sm_121": (20, 25)}
    | dict.fromkeys(("sm_90", "sm_100", "sm_120"), (100, 1000))
)
ON_METAL, ON_CUDA = (40, 40), (20, 100)
PASSES = 10  # that follow each other in a turn


def in_effect(architecture: str, environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Both limits by their variables: what is set, read as MLX does, or the GPU's default."""
    on_cuda = architecture.startswith("sm_")
    gpu, others = (architecture, ON_CUDA) if on_cuda else (architecture[-1:], ON_METAL)
    limits = dict(zip(UNITS, DEFAULTS.get(gpu, others), strict=True))
    for name in limits.keys() & environment.keys():
        limits[name] = int(environment[name]) if environment[name].isdigit() else 0
    return limits


def written(record: dict[str, Any] | None) -> str:
    """The cell of the report: both limits, and how many times as fast the others were."""
    if record is None:
        return "unused"
    values = (f"{record[unit]} {unit}" for unit in UNITS.values())
    trials = (f"{other}: {ratio or '–'}" for other, ratio in record["trials"].items())
    return f"{', '.join(values)} ({', '.join(trials)})"


class Passes:
    """A target whose passes over one position are timed, in this process or another."""

    def __init__(self, model: str | T5, dtype: str | None = None, source: int = 1) -> None:
        """Takes a model, or loads it in this type; its source has so many tokens."""
        target = model if isinstance(model, T5) else load(locate(model, convert), dtype)[0]
        self._pass = timer(target, time.perf_counter, source=source)

    def seconds(self) -> float:
        """The median of some passes."""
        return statistics.median(self._pass(1) for _ in range(PASSES))


def tried(
    target: T5, name: str, dtype: str | None, source: int, rounds: Callable[[], Iterable[int]]
) -> dict[str, Any] | None:
    """Both limits, and how many times as fast passes are with another value of each.

    Args:
        target: as it is loaded here.
        name: by which another process loads it.
        dtype: that it computes in.
        source: tokens of the prompt.
        rounds: as many as there is time for, for each value.

    Returns:
        "ops" and "MB"; "trials": a ratio by "1000 ops" and so on, None if the trial failed, as
        there may be no room for the target twice; None on a CPU, which has no such buffers.
    """
    if cpu_only():
        return None
    limits = in_effect(str(device_info().get("architecture", "")))
    here, trials = Passes(target, source=source), dict[str, Any]()
    weights = sum(array.nbytes for _, array in tree_flatten(target.parameters()))
    for variable, other in OTHERS.items():
        ratios: list[float] = []
        if weights < limit() - mx.get_active_memory():
            other_limit, common = {variable: str(other)}, {"dtype": dtype, "source": source}
            process = Process(f"{__name__}:Passes", other_limit, model=name, **common)
            with process, contextlib.suppress(UserError):
                process.call("seconds")  # may compile its kernels
                here.seconds()
                ratios = [here.seconds() / process.call("seconds") for _ in rounds()]
        trials[f"{other} {UNITS[variable]}"] = spread(ratios) if ratios else None
    return {unit: limits[variable] for variable, unit in UNITS.items()} | {"trials": trials}
