"""Saves the prompts of a server's requests, from which `distill.py --data` trains a draft."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable

from mlx_t5.errors import UserError

log = logging.getLogger(__name__)

START = b'{"prompt": "'  # of each line


class SavedPrompts:
    """A file of JSON lines {"prompt": …}, each prompt once; only its owner may read it."""

    def __init__(self, path: str, most: int) -> None:
        """Continues the file at `path`, up to `most` lines; removes a half line at its end.

        Raises:
            UserError: the file cannot be read or written, or has other lines.
        """
        self.most = most
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.fchmod(descriptor, 0o600)
            self.file = os.fdopen(descriptor, "rb+", buffering=0)  # buffers survive a full disk
            *lines, last = self.file.readall().split(b"\n")
            self.seen = {hash(json.loads(line)["prompt"]) for line in lines}
            try:
                if last:
                    self.seen.add(hash(json.loads(last)["prompt"]))
                    self.file.write(b"\n")
            except ValueError:
                if last[: len(START)] != START[: len(last)]:
                    raise
                log.warning("--save-prompts: the half line at the end of %s is removed", path)
                self.file.truncate(self.file.tell() - len(last))
        except OSError as error:
            raise UserError(f"--save-prompts: cannot open {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--save-prompts: {path} has other lines; name a new file") from None

    def add(self, prompts: Iterable[str]) -> None:
        """Appends new prompts; a full disk ends saving, but no request."""
        new = [p for p in dict.fromkeys(prompts) if hash(p) not in self.seen]
        new = new[: max(0, self.most - len(self.seen))]
        self.seen.update(hash(p) for p in new)
        size = os.fstat(self.file.fileno()).st_size
        data = "".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in new).encode()
        try:
            while data:
                data = data[self.file.write(data) :]
        except OSError as error:
            log.error("--save-prompts: cannot write: %s; no more prompts are saved", error.strerror)
            self.most = 0
            self.file.truncate(size)  # no half line stays
