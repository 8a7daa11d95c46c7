"""Finds, reads, writes and locks files; a file is written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_t5.errors import UserError, reason
from mlx_t5.installation import HOME

BUNDLED = HOME / "demo"  # the bundled pair
# The files of a model folder, in Hugging Face's layout.
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
TOKENIZER_FILES = tuple(
    "spiece.model tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt vocab.txt tokenizer.model".split()
)
# Further files of a folder of sentence-transformers, see checkpoints/pooling.py.
MODULES = "modules.json"
SENTENCE_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
MODULE_FOLDER = re.compile(r"\d{1,2}_(Pooling|Dense|Normalize)")
# The files that are downloaded and copied together with the weights.
CONFIG_FILES = ("config.json", "generation_config.json")
SMALL_FILES = (*CONFIG_FILES, *TOKENIZER_FILES, MODULES, *SENTENCE_SETTINGS)
PARTIAL = ".partial-"  # prefix of a file that is being written


def absolute(name: str | Path) -> Path:
    """The absolute form of a path that a user has typed, with `~` and links resolved."""
    try:
        path = Path(name).expanduser().resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # from Python 3.13 on `resolve` accepts circles
    except (OSError, RuntimeError) as error:  # which of the two depends on Python's version
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"{name} leads nowhere ({cause}); check the path") from None
    return path


def read_object(
    path: Path, cure: str = "fetch it again", default: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON object in a file, or the default if there is no file; `cure` ends the error."""
    if default is not None and not path.exists():
        return default
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise UserError(f"{path} is not a regular file; {cure}")
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {cure}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold an object: fetch it again")
    return value


def flush(descriptor: int) -> None:
    """Flushes an open file to the disk; on macOS `fsync` alone only reaches the disk's cache."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # not every disk supports it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries if the disk supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    except OSError as error:  # SMB and exFAT refuse folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Locks an open file or folder until it is closed; False if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other error: the file system has no locks
        return not isinstance(error, BlockingIOError)
    return True


def partial_file(path: str | Path) -> Path:
    """The name under which a file is written, beside its own; links are resolved."""
    path = Path(path).resolve()
    return path.with_name(f"{PARTIAL}{path.name}")


def put_in_place(partial: Path, path: str | Path) -> None:
    """Renames a partial file to `path`, or to where that leads, once it is on the disk."""
    with contextlib.suppress(OSError):  # there is no old file, or the disk has no modes
        partial.chmod(Path(path).stat().st_mode & 0o777)
    sync(partial)
    os.replace(partial, Path(path).resolve())


def replace_file(
    path: Path, write: Callable[[Path], object], cure: str = "go on with --resume"
) -> None:
    """Writes a file under a temporary name, and renames it once it is on the disk.

    Args:
        path: the file; if it cannot be written, an existing one stays.
        write: writes the file under the given temporary name, which has the suffix of `path`.
        cure: end of the error message, after "make room there and".

    Raises:
        UserError: the file cannot be written.
    """
    partial = partial_file(path)
    try:
        write(partial)
        put_in_place(partial, path)
    except (OSError, RuntimeError) as error:  # MLX raises the latter when a disk is full
        with contextlib.suppress(OSError):
            partial.unlink()
        cause = f"cannot write {path} ({getattr(error, 'strerror', None) or reason(error)})"
        raise UserError(f"{cause}; make room there and {cure}") from None
