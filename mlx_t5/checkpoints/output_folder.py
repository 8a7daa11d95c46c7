"""Writes a folder atomically: the folder appears complete or not at all.

The new folder is built next to its final path, under a hidden name with the process id, so that two
runs never share a folder. At the end the new folder is renamed to the final path. After an error or
a signal the new folder is removed, and any older folder at the final path stays. A killed process
leaves hidden folders, which the next run restores or removes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_t5.checkpoints.small_files import MODULE_FOLDER
from mlx_t5.disk import sync
from mlx_t5.errors import UserError
from mlx_t5.sizes import readable


def check_output_folder(path: Path, overwrite: bool, is_output: Callable[[str], bool]) -> None:
    """Refuses an output folder that must not be written to; cleans up after killed runs.

    Args:
        path: the folder's path.
        overwrite: whether an existing folder may be replaced.
        is_output: a function that takes a file's name and returns whether an earlier run may have
            written the file. A folder that holds any other file is never replaced.

    Raises:
        UserError: the folder exists and `overwrite` is False, the folder holds other files, or
            `path` is a file.
    """
    if path.parent.is_dir():
        _clear_leftovers(path)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file; choose another folder")
    if not overwrite:
        raise UserError(f"{path} exists; replace it with --overwrite or choose another folder")
    strangers = sorted(f.name for f in path.iterdir() if not _may_be_output(f, is_output))
    if strangers:
        names = ", ".join(strangers[:3])
        raise UserError(f"{path} holds more than a model ({names}); remove it yourself")


def require_apart(path: Path, source: Path) -> None:
    """Refuses to replace a folder that is the source, contains the source or is inside the source.

    The folders are compared as files, not by name, because the disks of Macs ignore case in names.

    Args:
        path: the folder to write; if it does not exist, nothing is replaced.
        source: the model folder to read.

    Raises:
        UserError: `path` may not be replaced.
    """
    source = source.resolve()
    pairs = [(path, f) for f in (source, *source.parents)] + [(source, f) for f in path.parents]
    if path.exists() and any(one.samefile(other) for one, other in pairs):
        raise UserError(f"{path} is the source, holds it or is a part of it; name another folder")


def _may_be_output(path: Path, is_output: Callable[[str], bool]) -> bool:
    """Returns whether an earlier run may have written the file or folder `path`.

    A run writes files, and folders of files for the modules of a sentence encoder. `is_output` must
    accept the names of all these files and folders.
    """
    is_module = MODULE_FOLDER.fullmatch(path.name) is not None
    if not is_output(path.name) or is_module != path.is_dir():
        return False
    return not is_module or all(is_output(f.name) and not f.is_dir() for f in path.iterdir())


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a new folder, which is renamed to `path` if the block ends without an error.

    Args:
        path: the final path, as checked by `check_output_folder`; its parent folders are made.
        overwrite: whether to replace a folder at `path`, which stays there until the block ends.

    Raises:
        UserError: `path` was made after it was checked, and `overwrite` is False.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    if os.path.lexists(path) and not overwrite:
        raise UserError(f"{path} exists, put back after a run that was killed; see --overwrite")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    with _ended_by_exceptions():
        try:
            partial.mkdir()
            yield partial
            sync(partial)
            if os.path.lexists(path):
                if not overwrite:
                    raise UserError(f"{path} has been made in the meantime; nothing is changed")
                path.rename(old)
            partial.rename(path)
            sync(path.parent)
        except BaseException:
            _undo(path, partial, old)
            raise
        if old.exists():
            old.rename(partial)  # so that a half-deleted folder is not restored
            shutil.rmtree(partial, ignore_errors=True)


def _undo(path: Path, partial: Path, old: Path) -> None:
    """Moves the old folder from `old` back to `path`, if needed; removes the new folder `partial`.

    The replacement of the old folder may have stopped at any point. If this function is interrupted
    too, the next run for the same output restores the old folder.
    """
    if old.exists():
        if path.exists() and not partial.exists():
            path.rename(partial)
        old.rename(path)
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _ended_by_exceptions() -> Iterator[None]:
    """Raises `SystemExit` for signals that would otherwise end the process at once.

    The signals are SIGTERM and SIGHUP. Only the main thread can set handlers in Python; in other
    threads nothing changes. A signal that is handled or ignored already, such as SIGHUP under
    `nohup`, stays so.
    """

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGTERM, signal.SIGHUP)
    handled = [n for n in signals if main and signal.getsignal(n) is signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, end)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def require_space(path: Path, needed: int) -> None:
    """Raises `UserError` unless `needed` bytes are free on the disk that will hold `path`."""
    place = next(parent for parent in path.parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        sizes = f"{readable(needed)} are needed and {readable(free)} are free"
        raise UserError(f"not enough space in {place}: {sizes}; make room or choose another place")


def _clear_leftovers(path: Path) -> None:
    """Removes hidden folders beside `path` that were left when an earlier run was killed.

    If the killed run has left nothing at `path`, this function moves the old folder back to `path`.
    """
    name = re.compile(rf"\.{re.escape(path.name)}\.(partial|old)-(\d+)")
    for folder in path.parent.iterdir():
        match = name.fullmatch(folder.name)
        if not match or _is_running(int(match[2])):
            continue
        if match[1] == "old" and not os.path.lexists(path):
            folder.rename(path)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    if pid == os.getpid():
        return False  # the folder is from an earlier process that had the same id
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
