"""A fast BLAS for MLX's CPU wheel on Linux, loaded before MLX.

The wheel has a reference BLAS on one core, where six rows take six times as long as one, so
speculative decoding would gain nothing. A faster library is therefore loaded first, with
RTLD_GLOBAL, and MLX uses that:

1. Intel's MKL, which `requirements.txt` installs on x86-64. For few rows it reads weights at the
   memory's speed, on AMD processors too. It runs on TBB's threads, which sleep when idle; OpenMP's
   would spin and take a core from MLX between multiplications (docs/performance.md).
2. OpenBLAS, if the system has it. It does not recognize processors newer than its release, so its
   kernels are chosen here.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.installation import cure

BLAS = "T5_BLAS"  # set by the user: one of BLAS_CHOICES
BLAS_CHOICES = ("mkl", "openblas", "none")
REFERENCE_BLAS = "MLX's reference BLAS"
TBB_THREADS = 4  # `MKL_THREADING_TBB` of mkl_service.h
CORETYPE = "OPENBLAS_CORETYPE"  # OpenBLAS reads it once, when it is loaded
# OpenBLAS's names of its kernels, best first, and the CPU flags that they need.
OPENBLAS_KERNELS = {
    "SkylakeX": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "Haswell": {"avx2", "fma"},
}

Loader = Callable[..., Any]


def load_blas(
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
        environment: may hold the user's choice in `T5_BLAS`, one of `BLAS_CHOICES`.
        mkl: the file of MKL to load; None finds the installed one.
        cpu_flags: returns the processor's flags; None reads them from Linux.

    Returns:
        Name, version and kernels, as in "OpenBLAS 0.3.21, SkylakeX kernels"; None keeps MLX's own.

    Raises:
        UserError: the user's choice is not among `BLAS_CHOICES`, or that library is not installed.
    """
    if not platform.startswith("linux"):
        return None
    requested = environment.get(BLAS, "")
    if requested and requested not in BLAS_CHOICES:
        raise UserError(f"{BLAS} must be mkl, openblas or none, not {requested:.40}")
    if requested == "none":
        return None
    for name in [requested] if requested else ["mkl", "openblas"]:
        try:
            if name == "mkl":
                return load_mkl(mkl or find_mkl(), loader, environment)
            return load_openblas(loader, environment, (cpu_flags or read_cpu_flags)())
        except OSError:
            continue
    if requested:
        raise UserError(f"{BLAS} is {requested}, which is not installed here")
    return None


def find_mkl() -> Path:
    """The path of the main library of pip's MKL; that library loads MKL's other parts."""
    try:
        files = metadata.files("mkl") or []
    except metadata.PackageNotFoundError as error:
        raise OSError("mkl is not installed") from error
    return Path(os.path.abspath(_first(files, "libmkl_rt.so").locate()))


def load_mkl(path: Path, loader: Loader, environment: MutableMapping[str, str]) -> str:
    """Loads MKL with TBB's threads, unless `MKL_THREADING_LAYER` names other threads."""
    # MKL loads its other parts at the first product, and ends the process if one is missing.
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
    best = next((name for name, needed in OPENBLAS_KERNELS.items() if needed <= cpu_flags), None)
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
    """The processor's flags as Linux lists them; empty if it lists none, as on ARM."""
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


def hint(blas_in_use: str, requested: str, cpu: bool) -> str:
    """Advice to install a faster BLAS, or ""."""
    if blas_in_use != REFERENCE_BLAS or requested or not cpu:
        return ""
    return (
        "hint: there is no fast BLAS, so MLX computes on one core and about 20 times slower; on "
        f"x86-64: {cure('mkl')}, elsewhere the system's OpenBLAS is used"
    )
