"""Sets up the environment that MLX expects when it is imported, and then imports MLX.

Every module imports MLX from this one, so that the environment is always set first:

    from mlx_t5.backend import mx, nn

MLX's CPU wheel for Linux has a reference BLAS on one core, where six rows take six times as long as
one, so speculative decoding would gain nothing. A faster library is therefore loaded first, with
RTLD_GLOBAL, and MLX uses that:

1. Intel's MKL, which is installed with MLX on x86-64. For few rows it reads weights at the
   memory's speed, on AMD processors too. It runs on TBB's threads, which sleep when idle; OpenMP's
   would spin and take a core from MLX between multiplications (docs/performance.md).
2. OpenBLAS, if the system has it. It does not recognize processors newer than its release, so its
   kernels are chosen here.

On an NVIDIA GPU, MLX compiles some kernels at their first use, in 3 to 4 s each, and keeps them in
the shared temporary folder (mlx/backend/cuda/jit_module.cpp), which the system empties; so
`keep_kernels` chooses a folder in the user's cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mlx_t5.errors import UserError, log
from mlx_t5.installation import cure

DEVICE = "T5_DEVICE"  # set by the user: cpu or gpu
REHEARSE = "T5_REHEARSE"  # if set, a CPU uses the code paths of GPUs; see `cpu_only`
SETTINGS = {
    # No TF32 in float32 products (CUDA, M5 and later): it has 10 bits of mantissa.
    "MLX_ENABLE_TF32": "0",
    # cuDNN makes a plan for every exact shape of attention, and raises after 512 of them.
    "MLX_CUDA_USE_CUDNN_SDPA": "0",
    # MLX keeps a CUDA graph for each shape of a pass; ragged batches need more than its 400.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
    # MLX would raise an error if it evicted graphs often, although that only costs time.
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}

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
KERNEL_FOLDER = "MLX_PTX_CACHE_DIR"  # MLX reads it when it compiles the first CUDA kernel
COMPILING = "compiling kernels for this GPU, once: up to a minute"
ELF = struct.Struct("<16s2HI3QI6H")  # the header of a compiled kernel's file

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
    wish = environment.get(BLAS, "")
    if wish and wish not in BLAS_CHOICES:
        raise UserError(f"{BLAS} must be {', '.join(BLAS_CHOICES[:-1])} or none, not {wish:.40}")
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
        raise UserError(f"{BLAS} is {wish}, which is not installed here")
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


# On Linux, MLX would not see the variables, and would keep its own BLAS.
_too_late = "mlx.core" in sys.modules and sys.platform.startswith("linux")
for _name, _value in SETTINGS.items():  # MLX reads its environment variables only once
    os.environ.setdefault(_name, _value)  # the user's own values stay
_loaded = None if _too_late else load_blas(sys.platform)

import mlx.core as mx  # noqa: E402  (only now: the library above must come first)
from mlx import nn as nn  # noqa: E402
from mlx import optimizers as optimizers  # noqa: E402
from mlx.utils import tree_flatten as tree_flatten  # noqa: E402
from mlx.utils import tree_map as tree_map  # noqa: E402
from mlx.utils import tree_unflatten as tree_unflatten  # noqa: E402


def choose_device(wish: str, choose: Callable[[Any], None] = mx.set_default_device) -> None:
    """Sets MLX's default device; "" keeps MLX's own choice."""
    if wish not in ("", "cpu", "gpu"):
        raise UserError(f"{DEVICE} must be cpu or gpu, not {wish:.40}")
    try:
        if wish:
            choose(mx.cpu if wish == "cpu" else mx.gpu)
    except ValueError:
        raise UserError(f"{DEVICE} is {wish}, and MLX has none here") from None


choose_device(os.environ.get(DEVICE, ""))


def on_cpu() -> bool:
    """Whether MLX computes on the CPU: there is no GPU, or the user chose the CPU."""
    return mx.default_device().type == mx.cpu


def on_cuda() -> bool:
    return mx.cuda.is_available() and not on_cpu()  # is_available only says how MLX was built


def cpu_only() -> bool:
    """Whether to use the CPU's code paths: `on_cpu()`, unless `T5_REHEARSE` is set.

    `T5_REHEARSE` makes a CPU use a GPU's code paths: compiled layers, padded sources, memory
    checks, and passes that start before Python has read the previous pass's token.
    The default type stays float32, because CPUs are slow with other types.
    """
    return on_cpu() and not os.environ.get(REHEARSE)


def device_info() -> dict[str, Any]:
    """MLX's facts about the device; with `T5_REHEARSE` a CPU adds memory, as Metal reports it."""
    facts = dict(mx.device_info())
    if on_cpu() and not cpu_only():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        metal = {"memory_size": memory, "max_recommended_working_set_size": memory * 3 // 4}
        facts = metal | facts
    return facts


def blas_name() -> str:
    return "Accelerate" if sys.platform == "darwin" else _loaded or REFERENCE_BLAS


def device_name() -> str:
    """The device's name; for a CPU, also the number of its cores and its BLAS."""
    name = str(mx.device_info().get("device_name", "unknown"))
    if not on_cpu():
        return name
    return f"{name}, {os.cpu_count()} cores, {blas_name()}"


def hint(blas_in_use: str, wish: str, cpu: bool) -> str:
    """Advice to install a faster BLAS, or ""."""
    if blas_in_use != REFERENCE_BLAS or wish or not cpu:
        return ""
    return (
        "hint: there is no fast BLAS, so MLX computes on one core and about 20 times slower; on "
        f"x86-64: {cure('mkl')}, elsewhere the system's OpenBLAS is used"
    )


def prepare_cuda(environment: MutableMapping[str, str]) -> None:
    """Makes MLX keep an NVIDIA GPU's compiled kernels; does nothing on other devices."""
    if not on_cuda():
        return
    facts = mx.device_info()
    if not facts:
        raise UserError(
            "MLX finds no NVIDIA GPU for this process (is the driver installed?); "
            f"{DEVICE}=cpu computes without one"
        )
    keep_kernels(environment, mx.__version__, facts)


def keep_kernels(
    environment: MutableMapping[str, str], version: str, facts: Mapping[str, Any]
) -> None:
    """Makes MLX keep compiled kernels in the user's cache folder, unless the user chose another."""
    if "architecture" not in facts:
        return
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or no access to it
        user_cache = environment.get("XDG_CACHE_HOME", "")
        home = Path(user_cache) if os.path.isabs(user_cache) else Path.home() / ".cache"
        # A kernel's file name does not tell the architecture, such as sm_90; so the folder does.
        folder = home / "mlx" / version / "ptx" / str(facts["architecture"])
        before = Path(environment.get(KERNEL_FOLDER) or folder)
        if before.parts[:-3] == folder.parts[:-3]:  # not set, or set by the parent process
            folder.mkdir(parents=True, exist_ok=True)
            _drop_damaged(folder)
            if os.access(folder, os.W_OK):
                environment[KERNEL_FOLDER] = str(folder)


def _drop_damaged(folder: Path) -> None:
    """Removes kernels that a full disk has truncated; with them MLX would fail at every start."""
    for path in folder.rglob("*.ptx"):
        with open(path, "rb") as file:
            head = file.read(ELF.size)
            size = os.fstat(file.fileno()).st_size
        if head[:4] != b"\x7fELF"[: len(head)]:
            continue
        fields = ELF.unpack(head.ljust(ELF.size))
        # The section table is at the file's end.
        if len(head) < ELF.size or fields[6] + fields[11] * fields[12] > size:
            path.unlink(missing_ok=True)


prepare_cuda(os.environ)
ON_CUDA = on_cuda()  # the device does not change


@cache
def announce_kernels() -> None:
    """Prints a line on standard error, at the first call, if kernels are going to be compiled."""
    default = Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "ptx"
    folder = Path(os.environ.get(KERNEL_FOLDER) or default)
    if on_cuda() and next(folder.rglob("*.ptx"), None) is None:
        log(COMPILING)


if _too_late:
    cause = "mlx was imported before mlx_t5, which is too late for a fast BLAS and MLX's variables"
    log(f"hint: {cause}; import from mlx_t5 first")
elif advice := hint(blas_name(), os.environ.get(BLAS, ""), on_cpu()):
    log(advice)
