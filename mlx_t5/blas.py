"""The BLAS that multiplies MLX's matrices on a Linux CPU; `backend` loads it before MLX.

MLX's CPU wheel for Linux has a reference BLAS. It runs on one core, and multiplying six rows by a
matrix takes six times as long as multiplying one row, so speculative decoding would not be faster.
So this module loads a faster library before MLX, with RTLD_GLOBAL; MLX then uses that library:

1. Intel's MKL, which `requirements.txt` installs on x86-64. For few rows it reads weights at the
   memory's speed, on AMD processors too. Here MKL uses TBB's threads, which sleep when idle. MKL's
   OpenMP threads would spin and take a core from MLX between multiplications (docs/performance.md).
2. OpenBLAS, if the system has it. It does not recognize processors that are newer than its
   release, so this module chooses its kernels.

Nothing here imports MLX or another module of this project.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

CORETYPE = "OPENBLAS_CORETYPE"  # OpenBLAS reads it once, when it is loaded
VARIABLE = "T5_BLAS"  # set by the user: one of CHOICES
CHOICES = ("mkl", "openblas", "none")
REFERENCE = "MLX's reference BLAS"
TBB_THREADS = 4  # `MKL_THREADING_TBB` of mkl_service.h
# OpenBLAS's names of its kernels, best first, and the CPU flags that they need.
KERNELS = {
    "SkylakeX": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "Haswell": {"avx2", "fma"},
}

Loader = Callable[..., Any]


def load(
    platform: str,
    loader: Loader = ctypes.CDLL,
    environment: MutableMapping[str, str] = os.environ,
    mkl: Path | None = None,
    cpu_flags: Callable[[], set[str]] | None = None,
) -> str | None:
    """Loads a BLAS that MLX will use if it is imported afterwards.

    Args:
        platform: as `sys.platform`; only Linux needs a library.
        loader: opens a shared library by name and raises `OSError` if there is none.
        environment: may hold the user's choice in `T5_BLAS`, one of `CHOICES`.
        mkl: the file of MKL to load; None finds the installed one.
        cpu_flags: returns the processor's flags; None reads them from Linux.

    Returns:
        The library's name, version and kernels, as in "OpenBLAS 0.3.21, SkylakeX kernels". None if
        no library was loaded and MLX's own BLAS stays in use.

    Raises:
        ValueError: the user's choice is not among `CHOICES`, or that library is not installed.
    """
    if not platform.startswith("linux"):
        return None
    wish = environment.get(VARIABLE, "")
    if wish and wish not in CHOICES:
        raise ValueError(f"{VARIABLE} must be {', '.join(CHOICES[:-1])} or none, not {wish:.40}")
    if wish == "none":
        return None
    for name in [wish] if wish else ["mkl", "openblas"]:
        try:
            if name == "mkl":
                return load_mkl(mkl or find_mkl(), loader, environment)
            return load_openblas(loader, environment, (cpu_flags or read_cpu_flags)())
        except OSError:
            continue
    if wish:
        raise ValueError(f"{VARIABLE} is {wish}, which is not installed here")
    return None


def find_mkl() -> Path:
    """Returns the path of the main library of pip's MKL; that library loads MKL's other parts.

    Raises:
        OSError: MKL is not installed, or its main library is missing.
    """
    try:
        files = metadata.files("mkl") or []
    except metadata.PackageNotFoundError as error:
        raise OSError("mkl is not installed") from error
    return Path(os.path.abspath(_first(files, "libmkl_rt.so").locate()))


def load_mkl(path: Path, loader: Loader, environment: MutableMapping[str, str]) -> str:
    """Loads MKL with TBB's threads, unless `MKL_THREADING_LAYER` names other threads.

    MKL loads its other parts only when it multiplies for the first time. If a part is missing, MKL
    ends the process. So this function first checks that the folder of `path` has TBB and MKL's part
    for TBB. TBB must be loaded before MKL.

    Args:
        path: the file of MKL's main library, from `find_mkl`.
        loader: as in `load`.
        environment: may set `MKL_THREADING_LAYER`.

    Returns:
        The library's name, version and kernels, as in `load`.

    Raises:
        OSError: one of these parts is missing, or a library cannot be loaded.
    """
    beside = sorted(path.parent.iterdir())
    _first(beside, "libmkl_tbb_thread.so")
    loader(str(_first(beside, "libtbb.so.")))
    library = loader(str(path), mode=ctypes.RTLD_GLOBAL)
    if "MKL_THREADING_LAYER" not in environment:
        # Before any other call, which would select Intel's threads.
        library.MKL_Set_Threading_Layer(TBB_THREADS)
    version = _MklVersion()
    library.MKL_Get_Version(ctypes.byref(version))
    # On Intel's processors "… (Intel(R) AVX-512) enabled processors"; on others without a name.
    kernels = re.search(rb"AVX[\w.-]*", version.processor or b"")
    name = kernels.group().decode() if kernels else "general"
    return f"MKL {version.major}.{version.update}, {name} kernels"


class _MklVersion(ctypes.Structure):
    """The C structure `MKLVersion`, as declared in mkl_types.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("major", "minor", "update")),
        *((name, ctypes.c_char_p) for name in ("status", "build", "processor", "platform")),
    )


def load_openblas(
    loader: Loader, environment: MutableMapping[str, str], cpu_flags: set[str]
) -> str:
    """Loads the system's OpenBLAS with the best kernels that the processor can run.

    Raises:
        OSError: OpenBLAS is not installed.
    """
    best = next((name for name, needed in KERNELS.items() if needed <= cpu_flags), None)
    unset = CORETYPE not in environment
    if best and unset:
        environment[CORETYPE] = best
    try:
        library = loader("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        library = loader("libopenblas.so", mode=ctypes.RTLD_GLOBAL)
    finally:
        if best and unset:  # so that an OpenBLAS elsewhere, as in a child process, can choose
            del environment[CORETYPE]
    # "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH …"
    config, kernels = _answer(library, "get_config"), _answer(library, "get_corename")
    return f"{' '.join(config.split()[:2])}, {kernels} kernels"


def read_cpu_flags(path: str = "/proc/cpuinfo") -> set[str]:
    """Returns the processor's flags as Linux lists them; empty if it lists none, as on ARM."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return set()
    return set(flags.partition(":")[2].split())


def _first(paths: Iterable[Any], start: str) -> Any:
    for path in paths:
        if path.name.startswith(start):
            return path
    raise OSError(f"no {start}")


def _answer(library: Any, question: str) -> str:
    ask = getattr(library, f"openblas_{question}")
    ask.restype = ctypes.c_char_p
    return ask().decode()
