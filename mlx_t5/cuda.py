"""What computing on an NVIDIA GPU needs: that there is one, and a place for compiled kernels.

MLX compiles some kernels when they are first needed, 3 to 4 s each. It keeps them in a folder, of
which it asks the environment when it compiles the first one; by default it lies below the system's
temporary one, which is everybody's and is emptied (mlx/backend/cuda/jit_module.cpp). The files are
named after what the kernels do and not after the GPU that they are for, so the folder has to be.

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

KERNELS = "MLX_PTX_CACHE_DIR"  # MLX's name
COMPILING = "compiling kernels for this GPU, once: up to a minute"
ELF = struct.Struct("<16s2HI3QI6H")  # the header of a compiled kernel's file


def require_gpu(facts: Mapping[str, Any]) -> None:
    """Checks that MLX, which has chosen to compute on a GPU, has one.

    Args:
        facts: what `mx.device_info` says, nothing where there is no GPU.

    Raises:
        ValueError: there is none; `mlx.launch` gives each rank one of its own.
    """
    if not facts:
        raise ValueError(
            "MLX finds no NVIDIA GPU for this process (is the driver installed?); T5_DEVICE=cpu "
            "computes without, and mlx.launch --backend ring has ranks share one"
        )


def keep_kernels(
    environment: MutableMapping[str, str], version: str, facts: Mapping[str, Any]
) -> None:
    """Has MLX keep compiled kernels in the user's cache folder; what the user has set stays.

    Args:
        environment: variables; `KERNELS` is set unless it is or the folder cannot be had.
        version: MLX's.
        facts: what `mx.device_info` says, the GPU's architecture ("sm_90") among it.
    """
    if "architecture" not in facts:
        return
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a closed one
        cache = environment.get("XDG_CACHE_HOME", "")
        home = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
        folder = home / "mlx" / version / "ptx" / str(facts["architecture"])
        before = Path(environment.get(KERNELS) or folder)
        if before.parts[:-3] == folder.parts[:-3]:  # not set, or by what has started this process
            folder.mkdir(parents=True, exist_ok=True)
            _drop_damaged(folder)
            if os.access(folder, os.W_OK):
                environment[KERNELS] = str(folder)


def kernels_to_come(environment: Mapping[str, str], version: str) -> bool:
    """Whether MLX has no compiled kernels yet, so that it is going to compile some."""
    default = Path(tempfile.gettempdir()) / "mlx" / version / "ptx"
    folder = Path(environment.get(KERNELS) or default)
    return next(folder.rglob("*.ptx"), None) is None


def _drop_damaged(folder: Path) -> None:
    """Removes compiled kernels that are cut short, as by a full disk: MLX would fail for ever."""
    for path in folder.rglob("*.ptx"):
        with open(path, "rb") as file:
            head = file.read(ELF.size)
            size = os.fstat(file.fileno()).st_size
        if head[:4] == b"\x7fELF"[: len(head)] and (len(head) < ELF.size or _end(head) > size):
            path.unlink(missing_ok=True)


def _end(head: bytes) -> int:
    """Where the table of an ELF file's sections ends, which stands at its end."""
    fields = ELF.unpack(head)
    return fields[6] + fields[11] * fields[12]
