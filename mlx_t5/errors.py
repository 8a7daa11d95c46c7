"""Errors and notes for users.

Nothing here imports MLX, so that a command line can refuse its options before MLX is loaded.
"""

from __future__ import annotations

import os
import re
import reprlib
import sys

LONGEST_MESSAGE = 2_000  # characters of an error; nobody reads more
# Words in MLX's RuntimeErrors when memory runs out, from its allocators ("[malloc] Unable to
# allocate …", with CUDA "… failed: out of memory") and Metal ("Insufficient Memory (0000…").
OUT_OF_MEMORY = ("alloc", "out of memory", "outofmemory", "insufficient memory")


class UserError(ValueError):
    """Bad input or a bad environment; the message is the one line that the user reads.

    Characters that are not printable are escaped. A long message is cut in the middle, because its
    end names the cure.
    """

    def __init__(self, message: str):
        if len(message) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            message = f"{message[:half]} … {message[-half:]}"
        super().__init__(_printable(message))


def log(line: str) -> None:
    """Prints a line on standard error, if that can be written."""
    try:
        if sys.stderr:  # None if it is closed
            print(line, file=sys.stderr, flush=True)
    except OSError:  # a full disk must not cost the results
        sys.stderr = open(os.devnull, "w")


def brief(value: object, longest: int = 100) -> str:
    """A value for an error message: a text or its `repr`, short and without control characters."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    return _printable(text if len(text) <= longest else f"{text[: longest - 1]}…")


def readable(size: float) -> str:
    """A size in bytes as text: in GB, or in MB below 0.1 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def reason(error: BaseException) -> str:
    """The first line of an exception's message, without error numbers and MLX's "[tag]"."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = re.sub(r"^\[[\w:]+\] ", "", str(error).strip().split("\n")[0])
    return text or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
