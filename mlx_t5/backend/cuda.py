"""Where MLX keeps the kernels that it compiles for an NVIDIA GPU.

MLX compiles some kernels at their first use, in 3 to 4 s each, and keeps them in the shared
temporary folder (mlx/backend/cuda/jit_module.cpp), which the system empties; so `keep_kernels`
chooses a folder in the user's cache.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from mlx_t5.backend.device import DEVICE, mx, on_cuda
from mlx_t5.errors import UserError, log

KERNEL_FOLDER = "MLX_PTX_CACHE_DIR"  # MLX reads it when it compiles the first CUDA kernel
COMPILING = "compiling kernels for this GPU, once: up to a minute"
ELF = struct.Struct("<16s2HI3QI6H")  # the header of a compiled kernel's file


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


@cache
def announce_kernels() -> None:
    """Prints a line on standard error, at the first call, if kernels are going to be compiled."""
    default = Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "ptx"
    folder = Path(os.environ.get(KERNEL_FOLDER) or default)
    if on_cuda() and next(folder.rglob("*.ptx"), None) is None:
        log(COMPILING)
