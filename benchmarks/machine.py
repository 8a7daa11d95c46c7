"""Where figures come from: the machine, what computes on it, and the versions that count.

MLX is imported only where it is asked about: some runs leave it to other processes.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model import T5

SECONDS_TO_ANSWER = 20  # of a program that is asked about the machine


def threads(blas: str, environment: Mapping[str, str] = os.environ) -> int:
    """Threads that a BLAS takes here: what the environment says, else all that we may use."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    for name in names if blas.startswith("OpenBLAS") else ():  # TBB's threads know neither
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(dtype: str) -> dict[str, Any]:
    """Where figures come from; `dtype` is what the target computes in."""
    from mlx_t5.backend import blas_name, device_name, mx

    on_cpu = mx.default_device().type == mx.cpu
    return {
        "machine": f"{platform.system()} {platform.machine()}, {device_name().split(', ')[0]}",
        "cores": os.cpu_count(),
        "threads": threads(blas_name()),
        "device": "cpu" if on_cpu else "gpu",
        "blas": blas_name() if on_cpu else None,
        "mlx": mx.__version__,
        "python": platform.python_version(),
        "dtype": dtype,
    }


def dtype_of(model: T5) -> str:
    """The type that a model computes in."""
    return str(model.dtype).removeprefix("mlx.core.")


def hardware(ask: Callable[..., str] | None = None, system: str = sys.platform) -> dict[str, Any]:
    """The chip, its GPU and the operating system, as far as they can be had.

    Args:
        ask: runs a program and returns what it prints.
        system: as `sys.platform` has it.

    Returns:
        chip, gpu (None where the CPU computes), gpu_cores (None but on a Mac), memory_bytes,
        system, and device, which is all that MLX knows of what computes.
    """
    from mlx_t5.backend import mx

    ask = ask or printed_by
    on_cpu = mx.default_device().type == mx.cpu
    device = dict(mx.device_info())
    facts = {
        "chip": mx.device_info(mx.cpu).get("device_name"),
        "system": _linux(),
        "gpu_cores": None,
    }
    if system == "darwin":
        facts = {
            "chip": ask("sysctl", "-n", "machdep.cpu.brand_string").strip() or facts["chip"],
            "system": f"macOS {platform.mac_ver()[0]}",
            "gpu_cores": cores_of_gpu(ask("system_profiler", "SPDisplaysDataType")),
        }
    return facts | {
        "gpu": None if on_cpu else device.get("device_name"),
        "memory_bytes": _memory_bytes(),
        "device": device,
    }


def cores_of_gpu(profile: str) -> int | None:
    """The number of GPU cores in what `system_profiler SPDisplaysDataType` prints."""
    cores = re.search(r"Total Number of Cores: (\d+)", profile)
    return int(cores[1]) if cores else None


def printed_by(*command: str) -> str:
    """What a program prints; nothing if it cannot be run or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _linux() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.machine()}"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
