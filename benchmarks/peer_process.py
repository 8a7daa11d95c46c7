"""An object in a process of its own, whose methods are called through pipes.

    python -m benchmarks.peer_process MODULE:CLASS

Standard input and output are JSON, one object a line. The first line in holds the keywords that
make the object; each further one names a method and its keywords and is answered by one line,
{"value": …} or {"error": "why"}. An object that cannot be made is an error too, and the end. What
libraries print goes to standard error. The process ends with its standard input, and so with
whoever started it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from benchmarks import REQUIREMENTS
from mlx_t5.cli.arguments import not_installed
from mlx_t5.errors import UserError


class Process:
    """A process and the object in it; leaving the context ends it, whatever it is doing."""

    def __init__(
        self, what: str, environment: Mapping[str, str], quiet: bool = True, **keywords: Any
    ):
        """Starts the process and does not wait until the object is made.

        Args:
            what: MODULE:CLASS.
            environment: variables to set in it beside those of this process.
            quiet: keep what it writes to standard error to itself.
            keywords: what the object is made with.
        """
        self._log = tempfile.TemporaryFile() if quiet else None
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment, "PYTHONPATH": paths},
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for this process, which ends the other
        )
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] and pipes[1], "both were asked for"
        self._requests, self._answers = pipes[0], pipes[1]
        self._send(keywords)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self._process.wait()
        self._answers.close()
        with contextlib.suppress(OSError):  # a line that was never read
            self._requests.close()
        if self._log:
            self._log.close()

    def end(self) -> None:
        """Ends the process; a call that waits for it fails."""
        self._process.kill()

    def call(self, method: str, **keywords: Any) -> Any:
        """What a method of the object returns, as JSON has it.

        Raises:
            UserError: it raised, the object could not be made, or the process has died; in one
                line why.
        """
        self._send({"method": method, "keywords": keywords})
        line = self._answers.readline()
        if not line.endswith("\n"):
            raise UserError(self._how_it_died())
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["value"]

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its last words may still be there to read
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()

    def _how_it_died(self) -> str:
        status = self._process.wait()
        kind = f"signal {-status}" if status < 0 else f"status {status}"
        last_words = ""
        if self._log:
            self._log.seek(0)
            last_words = self._log.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"its process ended with {kind}" + (f": {last_words}" if last_words else "")


def serve(what: str, requests: TextIO, answers: TextIO) -> None:
    """Makes the object and answers calls until there are no more."""

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    target: Any = None
    for line in requests:
        message = json.loads(line)
        try:
            if target is None:
                module, _, name = what.partition(":")
                target = getattr(importlib.import_module(module), name)(**message)
            else:
                answer(value=getattr(target, message["method"])(**message["keywords"]))
        except Exception as error:  # whatever a library raises is for the other process to judge
            if not isinstance(error, UserError):
                traceback.print_exc()
            answer(error=reason(error))
            if target is None:
                return


def reason(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, ImportError):
        return not_installed(error, REQUIREMENTS)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + (str(error).strip().split("\n")[0] or "no message")


def main() -> None:
    """Serves standard input, and keeps standard output from everyone else."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    serve(sys.argv[1], requests, answers)


if __name__ == "__main__":
    main()
