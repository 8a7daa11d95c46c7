"""Runs an object in its own process; the object's methods are called through a pipe.

The environment variables are set before the new process loads any library. The output of libraries
goes to standard error. The new process ends when the process that started it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from mlx_t5.cli.arguments import not_installed
from mlx_t5.errors import UserError

SECONDS_TO_END = 10


class Process:
    """A child process that makes one object and runs its methods; it ends after the block."""

    def __init__(self, what: str, environment: Mapping[str, str], **keywords: Any):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, pipe = spawn.Pipe()
        arguments = (pipe, dict(environment), what, keywords)
        self._process = spawn.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        pipe.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()  # so an idle process ends by itself, and frees its semaphores
        self._process.join(0 if exception[0] else SECONDS_TO_END)
        self._process.kill()
        self._process.join()

    def call(self, method: str, **keywords: Any) -> Any:
        try:
            with contextlib.suppress(BrokenPipeError):  # its last message may still be in the pipe
                self._pipe.send((method, keywords))
            error, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            status = self._process.exitcode or 0
            kind = f"signal {-status}" if status < 0 else f"status {status}"
            raise UserError(f"its process ended with {kind}") from None
        if error:
            raise UserError(error)
        return value


def serve(pipe: Connection, environment: dict[str, str], what: str, keywords: dict) -> None:
    os.setsid()  # Ctrl-C reaches only the process that started this one, which then ends this one
    os.environ.update(environment)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Line by line, so that killing the process loses no output.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        module, _, name = what.partition(":")
        target = getattr(importlib.import_module(module), name)(**keywords)
    except Exception as error:
        pipe.send((error_line(error), None))
        return
    reply: tuple[str | None, Any]
    with contextlib.suppress(EOFError):  # the other end is closed
        while True:
            method, arguments = pipe.recv()
            try:
                reply = None, getattr(target, method)(**arguments)
            except Exception as error:  # the caller gets the error of any library
                reply = error_line(error), None
            pipe.send(reply)


def error_line(error: Exception) -> str:
    if isinstance(error, ImportError):
        return not_installed(error)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    if kind:
        traceback.print_exception(error)
    return kind + (str(error).strip().split("\n")[0] or "no message")
