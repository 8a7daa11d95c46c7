"""Reads the small files of a model folder, and checks that files belong to the folder.

A folder is untrusted: config.json may be a pipe into which nobody writes, an endless device, a file
of a hundred gigabytes, or a link to a private key. So every small file is checked before it is read
or copied, by `read_small` or `require_small`. Weights are only checked for links, by `require_own`.
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
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
# Further files of a folder of sentence-transformers, see sentence_modules.py.
MODULES = "modules.json"
SENTENCE_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
MODULE_FOLDER = re.compile(r"\d{1,2}_(Pooling|Dense|Normalize)")
# The files that are downloaded and copied together with the weights.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    MODULES,
    *SENTENCE_SETTINGS,
)
# These are neither downloaded nor copied, as T5 has no chats, but transformers reads them.
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
MORE_CHAT_TEMPLATES = "additional_chat_templates"  # a folder of chat templates
JSON_BYTES = 1 << 22  # maximum size of a config.json or an index; t5-11b has at most 200 kB
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # see `require_own`
_REPOSITORY = "models--"
TOKENIZER_BYTES = 1 << 26  # maximum size of a tokenizer's file; the largest published has 35 MB


def place(name: str | Path) -> Path:
    """Returns the absolute form of a path that a user has typed, with `~` and links resolved.

    Raises:
        UserError: the path is impossible, because its `~NAME` names no user, its links form a
            circle, or the disk does not accept the name.
    """
    try:
        path = Path(name).expanduser().resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # from Python 3.13 on `resolve` accepts circles
    except (OSError, RuntimeError) as error:  # which of the two depends on Python's version
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name} leads nowhere ({reason}); check the path") from None
    return path


def read_small(path: Path, limit: int = JSON_BYTES, root: Path | None = None) -> bytes:
    """Returns the content of a regular file of a model folder.

    Args:
        path: the file.
        limit: the maximum number of bytes.
        root: the model folder; None is the folder that contains `path`.

    Raises:
        UserError: the file is not a regular file, is too large, or is a link that leads out of the
            folder.
        OSError: the file does not exist or cannot be read.
    """
    require_own(path, root)
    # Opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor), limit)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def read_object(path: Path, cure: str, root: Path | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file of a model folder.

    Args:
        path: the file.
        cure: the advice at the end of the error message, if the file cannot be read.
        root: the model folder; None is the folder that contains `path`.

    Raises:
        UserError: the file is missing, too large or damaged, holds no object, or is a link that
            leads out of the folder.
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
    """Checks a file before a library reads it; the arguments are those of `read_small`.

    Raises:
        UserError: the file does not exist, is not a regular file, is too large, or is a link that
            leads out of the folder.
    """
    require_own(path, root)
    try:
        _check(path, path.stat(), limit)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def snapshot_id(folder: Path) -> str | None:
    """Returns the Hub id of a snapshot in Hugging Face's cache; None for other folders."""
    repository = folder.parent.parent.name
    if folder.parent.name != SNAPSHOTS or not repository.startswith(_REPOSITORY):
        return None
    return repository.removeprefix(_REPOSITORY).replace("--", "/")


def require_own(path: Path, root: Path | None = None) -> None:
    """Raises `UserError` for a link from a model folder to a file outside it.

    Following such a link could disclose or publish a private file. Links within the folder are
    allowed, and the folder itself may be a link. If the folder is a snapshot in Hugging Face's
    cache, `models--OWNER--NAME/snapshots/COMMIT`, links to files in two more folders are allowed:
    `models--OWNER--NAME/blobs`, and the folder `blobs` beside `models--OWNER--NAME`.

    Args:
        path: a file or a folder in the model folder; it need not exist.
        root: the model folder; None is the folder that contains `path`.

    Raises:
        UserError: `path`, or a folder on the way to it, is a link that leads outside the folder.
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
        sizes = f"{readable(facts.st_size)}, and no such file has more than {readable(limit)}"
        raise UserError(f"{path} has {sizes}: fetch it again")
