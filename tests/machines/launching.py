"""Starts ranks on this machine, as `mlx.launch` does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import main
from mlx_t5.backend import mx

ROOT = Path(main.__file__).parent
LAUNCHER = shutil.which("mlx.launch", path=sysconfig.get_path("scripts"))
needs_ring = pytest.mark.skipif(
    not (LAUNCHER and mx.distributed.is_available("ring")),
    reason="MLX has no ring here, or mlx.launch is not installed",
)


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive free ports."""
    for first in range(20000 + os.getpid() % 10000, 60000, 16):
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise AssertionError("no free ports")


def launch(ranks: int, *command: str) -> subprocess.Popen:
    """Starts ranks; standard input stays open, because the launcher spins after its end."""
    how = ["-n", str(ranks), "--backend", "ring", "--python", sys.executable]
    how += ["--starting-port", str(free_ports(ranks)), "--cwd", str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # ranks share the cores
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [LAUNCHER, *how, *command], env=environment, start_new_session=True, text=True, **pipes
    )


def finish(started: subprocess.Popen, seconds: float = 120) -> tuple[str, str]:
    """Waits for all ranks; returns the standard output and error of rank 0 and the launcher.

    Raises:
        TimeoutExpired: if the ranks hang; they are ended first.
    """
    try:
        started.wait(seconds)
        return started.stdout.read(), started.stderr.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.stdin.close()
