"""Prepares an NVIDIA GPU for computing: checks that it exists, and keeps compiled kernels.

MLX compiles some kernels at their first use, in 3 to 4 s each, and keeps them in a folder (see
mlx/backend/cuda/jit_module.cpp). By default this folder is in the system's temporary folder, which
all users share and the system empties. So `keep_kernels` chooses a folder in the user's cache. MLX
reads the folder's name from the environment when it compiles the first kernel. A kernel's file name
does not tell the GPU's architecture, so the chosen folder is named after the architecture.

Nothing here imports MLX.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

KERNELS = "MLX_PTX_CACHE_DIR"  # an environment variable of MLX
COMPILING = "compiling kernels for this GPU, once: up to a minute"
ELF = struct.Struct("<16s2HI3QI6H")  # the header of a compiled kernel's file


def require_gpu(facts: Mapping[str, Any]) -> None:
    """Checks that there is a GPU; to be called only if MLX is going to compute on a GPU.

    Args:
        facts: the result of `mx.device_info`, empty without a GPU.

    Raises:
        ValueError: there is no GPU.
    """
    if not facts:
        raise ValueError(
            "MLX finds no NVIDIA GPU for this process (is the driver installed?); "
            "T5_DEVICE=cpu computes without one"
        )


def keep_kernels(
    environment: MutableMapping[str, str], version: str, facts: Mapping[str, Any]
) -> None:
    """Makes MLX keep compiled kernels in the user's cache folder, unless the user chose another.

    Args:
        environment: environment variables. `MLX_PTX_CACHE_DIR` is set, unless the user has set it
            or the folder cannot be made or written to.
        version: MLX's version.
        facts: the result of `mx.device_info`, with the GPU's architecture (such as "sm_90").
    """
    if "architecture" not in facts:
        return
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or no access to it
        cache = environment.get("XDG_CACHE_HOME", "")
        home = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
        folder = home / "mlx" / version / "ptx" / str(facts["architecture"])
        before = Path(environment.get(KERNELS) or folder)
        if before.parts[:-3] == folder.parts[:-3]:  # not set, or set by the parent process
            folder.mkdir(parents=True, exist_ok=True)
            _drop_damaged(folder)
            if os.access(folder, os.W_OK):
                environment[KERNELS] = str(folder)


def kernels_to_come(environment: Mapping[str, str], version: str) -> bool:
    """Returns whether MLX is going to compile kernels, because none is stored yet."""
    default = Path(tempfile.gettempdir()) / "mlx" / version / "ptx"
    folder = Path(environment.get(KERNELS) or default)
    return next(folder.rglob("*.ptx"), None) is None


def _drop_damaged(folder: Path) -> None:
    """Removes kernels that a full disk has truncated; with them MLX would fail at every start."""
    for path in folder.rglob("*.ptx"):
        with open(path, "rb") as file:
            head = file.read(ELF.size)
            size = os.fstat(file.fileno()).st_size
        if head[:4] == b"\x7fELF"[: len(head)] and (len(head) < ELF.size or _end(head) > size):
            path.unlink(missing_ok=True)


def _end(head: bytes) -> int:
    """Returns an ELF file's full size, from its header: the section table is at the file's end."""
    fields = ELF.unpack(head)
    return fields[6] + fields[11] * fields[12]
