"""What users are told: the error that every module raises for bad input, and notes.

Nothing here imports MLX, so that a command line can refuse its options before it does.
"""

from __future__ import annotations

import re
import reprlib
import sys

LONGEST_MESSAGE = 2_000  # characters of an error; nobody reads more
# In MLX's RuntimeErrors: its allocators' words ("[malloc] Unable to allocate …", "… failed: out of
# memory" with CUDA) and Metal's ("Insufficient Memory (00000008:kIOGPU…OutOfMemory)").
OUT_OF_MEMORY = ("alloc", "out of memory", "outofmemory", "insufficient memory")


# What the backends of `mx.distributed` put before theirs.
BACKENDS = ("[ring]", "[jaccl]", "[nccl]", "[mpi]")


class UserError(ValueError):
    """Bad input or a bad environment; the message is the one line that the user reads.

    Whatever it quotes, it is one line that a terminal can show: what is too long loses its middle,
    as the cure stands at the end.
    """

    def __init__(self, message: str):
        if len(message) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            message = f"{message[:half]} … {message[-half:]}"
        super().__init__(_printable(message))


def log(line: str) -> None:
    """Prints a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def shown(value: object, longest: int = 100) -> str:
    """What an error quotes of its input: short, and without characters that control a terminal.

    Args:
        value: a text as it is, or another value, of which `repr` is quoted.
        longest: characters of it at most.
    """
    text = value if isinstance(value, str) else reprlib.repr(value)
    return _printable(text if len(text) <= longest else f"{text[: longest - 1]}…")


def reason(error: BaseException) -> str:
    """What an exception says, in one line, without the system's number or MLX's function."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = re.sub(r"^\[[\w:]+\] ", "", str(error).strip().split("\n")[0])
    return text or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the machine or the GPU has run out of memory."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, RanksApart)) and any(
        words in text for words in OUT_OF_MEMORY
    )


class RanksApart(Exception):
    """One of several ranks has failed where all compute together: none of them can go on.

    Attributes:
        lost: whether it was another rank, which cannot be reached any longer.
    """

    def __init__(self, cause: BaseException):
        super().__init__(reason(cause))
        self.lost = is_lost_rank(cause)


def is_lost_rank(error: BaseException) -> bool:
    """Whether an exception says that another rank cannot be reached."""
    if isinstance(error, RanksApart):
        return error.lost
    return isinstance(error, RuntimeError) and str(error).lower().startswith(BACKENDS)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
