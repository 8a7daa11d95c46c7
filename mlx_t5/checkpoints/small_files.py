"""Reads the small files of a model folder, and says which files are the folder's own.

A folder comes from a stranger: under a name such as config.json there can be a pipe on which nobody
writes, a device that never ends, a hundred gigabytes, or a link to somebody's keys. So whatever is
read or copied from a model folder, weights included, goes through `require_own` first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.sizes import readable

TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# What a folder of sentence-transformers has beside them, see sentence_modules.py.
MODULES = "modules.json"
SENTENCE_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
MODULE_FOLDER = re.compile(r"\d{1,2}_(Pooling|Dense|Normalize)")
# All that are fetched and copied with the weights.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    MODULES,
    *SENTENCE_SETTINGS,
)
# Not copied or fetched, as T5 has no chats; but transformers reads them where they are.
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
MORE_CHAT_TEMPLATES = "additional_chat_templates"  # a folder of them
JSON_BYTES = 1 << 22  # of a config.json or an index; those of t5-11b take 200 kB at most
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # see `require_own`
_REPOSITORY = "models--"
TOKENIZER_BYTES = 1 << 26  # of a tokenizer's file; the largest published ones take 35 MB


def place(name: str | Path) -> Path:
    """Where a path that somebody has typed leads: `~` and links are followed.

    Raises:
        UserError: it leads nowhere: there is no such user, links run in a circle, or the disk
            takes no such name.
    """
    try:
        path = Path(name).expanduser().resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # from Python 3.13 on `resolve` takes circles as they are
    except (OSError, RuntimeError) as error:  # which of the two depends on Python's version
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name} leads nowhere ({reason}); check the path") from None
    return path


def read_small(path: Path, limit: int = JSON_BYTES, root: Path | None = None) -> bytes:
    """The content of a regular file of a model folder.

    Args:
        path: the file.
        limit: the most bytes that it may have.
        root: as of `require_own`.

    Raises:
        UserError: it is no regular file, a larger one, or a link out of the folder.
        OSError: it is not there or cannot be read.
    """
    require_own(path, root)
    # Opening a pipe would wait for somebody who writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor), limit)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def read_object(path: Path, cure: str, root: Path | None = None) -> dict[str, Any]:
    """The object that a JSON file of a model folder holds.

    Args:
        path: the file.
        cure: what to tell where it cannot be read.
        root: as of `require_own`.

    Raises:
        UserError: there is no such file, it is too large, damaged or a link out of the folder, or
            holds no object.
    """
    try:
        text = read_small(path, root=root)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {cure}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no valid JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no object: fetch it again")
    return value


def require_small(path: Path, limit: int = TOKENIZER_BYTES, root: Path | None = None) -> None:
    """Refuses what is no regular file of at most `limit` bytes, for those that others read.

    Raises:
        UserError: see `read_small`; or it is not there.
    """
    require_own(path, root)
    try:
        _check(path, path.stat(), limit)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def snapshot_id(folder: Path) -> str | None:
    """The Hub id of a snapshot in Hugging Face's cache; None of other folders."""
    repository = folder.parent.parent.name
    if folder.parent.name != SNAPSHOTS or not repository.startswith(_REPOSITORY):
        return None
    return repository.removeprefix(_REPOSITORY).replace("--", "/")


def require_own(path: Path, root: Path | None = None) -> None:
    """Refuses a link out of a model folder, which would read or publish whatever it leads to.

    Links within the folder may be, and so may the folder itself be one. In the Hub's cache a folder
    `models--OWNER--NAME/snapshots/COMMIT` consists of links into `models--OWNER--NAME/blobs`, and
    these may be links into `blobs` beside the repositories, which all of them share.

    Args:
        path: a file or a folder in it; it need not be there.
        root: the model folder; None is the folder that `path` is in.

    Raises:
        UserError: the path, or a folder on the way to it, is a link that leads elsewhere.
    """
    folder = Path(os.path.realpath(root or path.parent))
    allowed, repository = [folder], folder.parent.parent
    if snapshot_id(folder):
        allowed += [repository / BLOBS, repository.parent / BLOBS]
    if not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in allowed):
        raise UserError(f"{path} is a link out of its folder; put a copy of the file there")


def _check(path: Path, facts: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise UserError(f"{path} is no regular file; put a copy of the original there")
    if facts.st_size > limit:
        sizes = f"{readable(facts.st_size)}, and none has more than {readable(limit)}"
        raise UserError(f"{path} has {sizes}: fetch it again")
