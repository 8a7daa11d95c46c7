"""Runs the server in a separate process, on a free port of the loopback interface."""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

import server
from standard_error import messages

ROOT = Path(server.__file__).parent
CACHE = tempfile.TemporaryDirectory()  # compiled kernels of all servers of the tests
LOOKUP_TOO = ("--draft-model", f"{ROOT}/demo/draft+lookup")
LOOKUP_TOO += ("--dtype", "float32", "--num-draft", "5", "--answer-cache", "0")
PATIENCE = 60  # seconds; nothing waits so long unless it fails


class Asked:
    """Sends the requests of tests to a server; subclasses set the client `http`."""

    def idle(self) -> bool:
        """Returns whether the server decodes no row and no row waits."""
        state = self.http.get("/health").json()
        return state["running"] == state["waiting"] == 0

    def metric(self, name: str) -> float:
        """Returns the value of a metric with labels; 0 before the first count."""
        text = self.http.get("/metrics").text
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(match.group(1)) if match else 0.0


class Server(Asked):
    """A running server.

    Attributes:
        url: its address.
        pid: the id of its process.
        signal: sends it a signal.
        lines: the lines on standard error so far.
    """

    def __init__(self, *argv: str, key: str | None = None, **environment: str):
        """Starts the server and waits until it listens."""
        command = [sys.executable, str(ROOT / "server.py"), "--port", "0", *argv]
        environment = {**os.environ, "XDG_CACHE_HOME": CACHE.name, **environment}
        pipes = {"stderr": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)
        self.pid = self._process.pid
        self.signal = self._process.send_signal
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.until(lambda: re.search(r"serving .* at (http://\S+)", self.log))[1]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE)

    def _read(self) -> None:
        for line in self._process.stderr:
            self.lines += [line] if messages(line) else []

    @property
    def log(self) -> str:
        """Returns everything that the server has written to standard error so far."""
        return "".join(self.lines)

    def until(self, condition, seconds: float = PATIENCE):
        """Calls `condition()` until its value is true or the process ends; returns the value."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert self._process.poll() is None, self.log
            if time.monotonic() > end:
                self._process.kill()  # the caller may not hold the server yet
                raise AssertionError(self.log)
            time.sleep(0.01)
        return value

    def wait(self) -> int:
        """Waits for the end of the server; returns the exit status."""
        status = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def close(self) -> None:
        """Ends the server with SIGTERM, or kills it if that does not work."""
        self.http.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
