"""Files that are there whole or not at all, also after a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from mlx_t5.disk import sync
from mlx_t5.errors import UserError

PARTIAL = ".partial-"  # before the name of a file that is being written


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under another name and gives it its own when it is on the disk.

    Args:
        path: the file.
        write: writes the file that it is given, whose name ends as that of `path`.

    Raises:
        UserError: it cannot be written; what was at `path` stays.
    """
    partial = path.with_name(f"{PARTIAL}{path.name}")
    try:
        write(partial)
        sync(partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # the latter is what MLX makes of a full disk
        with contextlib.suppress(OSError):
            partial.unlink()
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise UserError(
            f"cannot write {path} ({reason}); make room there and go on with --resume"
        ) from None
