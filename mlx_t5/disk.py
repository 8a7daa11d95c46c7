"""What files and folders need of the system: to be on the disk, and to be one process's alone."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Locks an open file or folder for this process, until it is closed.

    Returns:
        False if another process has it. Where the system has no such locks, nothing is locked.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, or a file system without locks
        pass
    return True
