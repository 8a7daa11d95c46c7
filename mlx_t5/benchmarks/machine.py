"""Describes where figures come from: the machine, the device that computes, and the versions.

Only the functions that need MLX import it, because some subcommands use MLX only in other
processes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_t5.model import T5

SECONDS_TO_ANSWER = 20  # time limit for a program that is asked about the machine


def threads(blas: str, environment: Mapping[str, str] = os.environ) -> int:
    """The number of threads that a BLAS uses."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    for name in names if blas.startswith("OpenBLAS") else ():  # TBB ignores both variables
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(dtype: str) -> dict[str, Any]:
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
    return str(model.dtype).removeprefix("mlx.core.")


def hardware() -> dict[str, Any]:
    from mlx_t5.backend import mx

    on_cpu = mx.default_device().type == mx.cpu
    device = dict(mx.device_info())
    chip, cores = mx.device_info(mx.cpu).get("device_name"), None
    system = platform.platform()
    if sys.platform == "darwin":
        profile = _printed_by("system_profiler", "SPDisplaysDataType")
        cores = re.search(r"Total Number of Cores: (\d+)", profile)
        chip = _printed_by("sysctl", "-n", "machdep.cpu.brand_string").strip() or chip
        system = f"macOS {platform.mac_ver()[0]}"
    else:
        with contextlib.suppress(OSError, KeyError):
            name = platform.freedesktop_os_release()["PRETTY_NAME"]
            system = f"{name}, {platform.machine()}"
    return {
        "chip": chip,
        "system": system,
        "gpu_cores": int(cores[1]) if cores else None,
        "gpu": None if on_cpu else device.get("device_name"),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device,
    }


def _printed_by(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
