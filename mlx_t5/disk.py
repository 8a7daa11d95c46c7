"""What files and folders need of the system: to be whole, on the disk, and one process's alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mlx_t5.errors import UserError, reason

PARTIAL = ".partial-"  # before the name of a file that is being written


def is_macos_file(name: str) -> bool:
    """Whether a file is what macOS leaves in folders (`.DS_Store`, AppleDouble's `._*`)."""
    return name == ".DS_Store" or name.startswith("._")


def flush(descriptor: int) -> None:
    """Flushes an open file to the disk; on macOS `fsync` only reaches the disk's own cache."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # not every disk can
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries where the disk can do that, see `flush`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    except OSError as error:  # SMB and exFAT refuse folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Locks an open file or folder for this process, until it is closed.

    Returns:
        False if another process has it. Where the system has no such locks, nothing is locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # of another kind where a file system has no locks
        return not isinstance(error, BlockingIOError)
    return True


def replace_file(
    path: Path, write: Callable[[Path], object], cure: str = "go on with --resume"
) -> None:
    """Writes a file under another name and gives it its own when it is on the disk.

    Args:
        path: the file.
        write: writes the file that it is given, whose name ends as that of `path`.
        cure: what to do once there is room.

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
        cause = f"cannot write {path} ({getattr(error, 'strerror', None) or reason(error)})"
        raise UserError(f"{cause}; make room there and {cure}") from None
