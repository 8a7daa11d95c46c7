"""Saves the prompts that a server has decoded, from which `distill.py --data` trains a draft."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable

from mlx_t5.errors import UserError

log = logging.getLogger(__name__)


class SavedPrompts:
    """A file of JSON lines {"prompt": …}, each prompt once; only its owner may read it."""

    def __init__(self, path: str, most: int) -> None:
        """Continues the file at `path`, up to `most` lines.

        Raises:
            UserError: the file cannot be read or written, or has other lines.
        """
        self.most, self.seen = most, set[int]()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.fchmod(descriptor, 0o600)
            self.file = os.fdopen(descriptor, "a+", encoding="utf-8")
            self.file.seek(0)
            end = "\n"
            for line in self.file:
                end = line[-1]
                self.seen.add(hash(json.loads(line)["prompt"]))
            if end != "\n":
                self.file.write("\n")
        except OSError as error:
            raise UserError(f"--save-prompts: cannot open {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--save-prompts: {path} has other lines; name a new file") from None

    def add(self, prompts: Iterable[str]) -> None:
        """Appends new prompts; a full disk ends saving, but no request."""
        new = [p for p in dict.fromkeys(prompts) if hash(p) not in self.seen]
        new = new[: max(0, self.most - len(self.seen))]
        self.seen.update(map(hash, new))
        try:
            self.file.writelines(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in new)
            self.file.flush()
        except OSError as error:
            log.error("--save-prompts: cannot write: %s; no more prompts are saved", error.strerror)
            self.most = 0
