"""Reads the small files of a model folder, which may be made to hang or to fill the memory.

A folder comes from a stranger: under a name such as config.json there can be a pipe on which nobody
writes, a device that never ends, or a hundred gigabytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from mlx_t5.errors import UserError, shown
from mlx_t5.sizes import readable

TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# What a folder of sentence-transformers has beside them, see network/pooling.py.
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
JSON_BYTES = 1 << 22  # of a config.json or an index; those of t5-11b take 200 kB at most
SNAPSHOTS = "snapshots"  # in the Hub's cache: models--OWNER--NAME/snapshots/COMMIT
TOKENIZER_BYTES = 1 << 26  # of a tokenizer's file; the largest published ones take 35 MB


def place(name: str | Path) -> Path:
    """Where a path that somebody has typed leads: `~` and links are followed.

    Raises:
        UserError: it leads nowhere: there is no such user, or links run in a circle.
    """
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # which of the two depends on Python's version
        raise UserError(f"{shown(str(name))} leads nowhere ({error}); check the path") from None


def read_small(path: Path, limit: int = JSON_BYTES) -> bytes:
    """The content of a regular file.

    Args:
        path: the file.
        limit: the most bytes that it may have.

    Raises:
        UserError: it is no regular file, or a larger one.
        OSError: it is not there or cannot be read.
    """
    # Opening a pipe would wait for somebody who writes.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        _check(path, os.fstat(descriptor), limit)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def read_object(path: Path, cure: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        path: the file.
        cure: what to tell where it cannot be read.

    Raises:
        UserError: there is no such file, it is too large or damaged, or holds no object.
    """
    try:
        text = read_small(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {cure}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no valid JSON ({error}): fetch it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object: fetch it again")
    return found


def require_small(path: Path, limit: int = TOKENIZER_BYTES) -> None:
    """Raises `UserError` unless `path` is a regular file of at most `limit` bytes."""
    try:
        _check(path, path.stat(), limit)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def require_own(path: Path) -> None:
    """Refuses a link out of its folder, which would publish whatever file it leads to.

    A Hub snapshot consists of links into the `blobs` of the same repository's cache: those may be.

    Raises:
        UserError: the file that `path` leads to lies elsewhere.
    """
    folder, file = path.parent.resolve(), path.resolve()
    own = [folder]
    if folder.parent.name == SNAPSHOTS:
        own.append(folder.parent.parent / "blobs")
    if file.parent not in own:
        raise UserError(f"{path} is a link out of its folder; put a copy of the file there")


def _check(path: Path, facts: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise UserError(f"{path} is no regular file; put a copy of the original there")
    if facts.st_size > limit:
        sizes = f"{readable(facts.st_size)}, and none has more than {readable(limit)}"
        raise UserError(f"{path} has {sizes}: fetch it again")
