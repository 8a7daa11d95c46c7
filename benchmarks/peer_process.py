"""An object in a process of its own, whose methods are called through a pipe.

The process is started afresh, so it has loaded nothing yet when its variables are set. What
libraries print goes to standard error. It ends with whoever started it.
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

from benchmarks import REQUIREMENTS
from mlx_t5.cli.arguments import not_installed
from mlx_t5.errors import UserError


class Process:
    """A process and the object in it; leaving the context ends it, whatever it is doing."""

    def __init__(self, what: str, environment: Mapping[str, str], **keywords: Any):
        """Starts the process and does not wait until the object is made.

        Args:
            what: MODULE:CLASS.
            environment: variables to set in it beside those of this process.
            keywords: what the object is made with.
        """
        spawn = multiprocessing.get_context("spawn")
        self._pipe, pipe = spawn.Pipe()
        arguments = (pipe, dict(environment), what, keywords)
        self._process = spawn.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        pipe.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def call(self, method: str, **keywords: Any) -> Any:
        """What a method of the object returns.

        Raises:
            UserError: it raised, the object could not be made, or the process has died; in one
                line why.
        """
        try:
            with contextlib.suppress(BrokenPipeError):  # its last words may still be there to read
                self._pipe.send((method, keywords))
            error, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise UserError(self._how_it_died()) from None
        if error:
            raise UserError(error)
        return value

    def _how_it_died(self) -> str:
        self._process.join()
        status = self._process.exitcode or 0
        kind = f"signal {-status}" if status < 0 else f"status {status}"
        return f"its process ended with {kind}"


def serve(pipe: Connection, environment: dict[str, str], what: str, keywords: dict) -> None:
    """Makes the object and answers calls until there are no more; arguments as of `Process`."""
    os.setsid()  # Ctrl-C is for the process that started this one, and ends it
    os.environ.update(environment)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be killed
    try:
        module, _, name = what.partition(":")
        target = getattr(importlib.import_module(module), name)(**keywords)
    except Exception as error:
        pipe.send((reason(error), None))
        return
    answer: tuple[str | None, Any]
    with contextlib.suppress(EOFError):  # the other end is closed
        while True:
            method, arguments = pipe.recv()
            try:
                answer = None, getattr(target, method)(**arguments)
            except Exception as error:  # whatever a library raises is for the caller
                answer = reason(error), None
            pipe.send(answer)


def reason(error: Exception) -> str:
    """An error in one line; all of one that is not for users goes to standard error."""
    if isinstance(error, ImportError):
        return not_installed(error, REQUIREMENTS)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    if kind:
        traceback.print_exception(error)
    return kind + (str(error).strip().split("\n")[0] or "no message")
