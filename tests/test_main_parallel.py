"""One file over several ranks: the output is that of one process, whoever is killed."""

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

from command_line import ROOT

PATIENCE = 120
LAUNCHER = shutil.which("mlx.launch", path=sysconfig.get_path("scripts"))
SAMPLED = ["--temp", "1", "--seed", "3", "--batch-size", "2", "-m", "24"]
TIMES = ("encode_seconds", "decode_seconds", "tokens_per_second", "peak_memory_bytes")
LINES = [f"line {i}" for i in range(40)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def records(path: Path) -> list[dict]:
    """The objects of an output, without times."""
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for record in found:
        for name in TIMES:
            del record["stats"][name]
    return found


@pytest.fixture(scope="module")
def wanted(models, tmp_path_factory):
    """What one process makes of the lines."""
    import main

    folder = tmp_path_factory.mktemp("alone")
    (folder / "in.txt").write_text("\n".join(LINES))
    files = ["--input-file", str(folder / "in.txt"), "--output-file", str(folder / "out.jsonl")]
    assert main.main([*models, *SAMPLED, *files]) == 0
    return records(folder / "out.jsonl")


class Ranks:
    """Two ranks of one machine, started without a launcher."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        hosts = [[f"127.0.0.1:{free_port()}"], ["127.0.0.1:1"]]
        (folder / "hosts.json").write_text(json.dumps(hosts))
        self._environment = {**os.environ, "MLX_HOSTFILE": str(folder / "hosts.json")}
        self._options = options
        self.told: queue.Queue[str] = queue.Queue()
        self.all = [self.start(0), self.start(1)]
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, rank: int) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "main.py"), "--parallel", "data", *self._options],
            env={**self._environment, "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _read(self) -> None:
        for line in self.all[0].stderr:
            self.told.put(line.rstrip("\n"))

    def wait_for(self, beginning: str) -> str:
        """Waits until rank 0 tells a line that begins so."""
        while not (line := self.told.get(timeout=PATIENCE)).startswith(beginning):
            pass
        return line

    def kill(self) -> None:
        for process in self.all:
            process.kill()


@pytest.fixture
def fed(models, tmp_path):
    """Two ranks whose input is a pipe, so that they do not come to its end before they are to."""
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    options = [*models, *SAMPLED, "-v", "--input-file", str(pipe), "--output-file", str(out)]
    ranks = Ranks(tmp_path, options)
    with open(pipe, "w") as feed:
        try:
            yield ranks, feed, out
        finally:
            ranks.kill()


def give(feed, lines: list[str]) -> None:
    feed.write("".join(f"{line}\n" for line in lines))
    feed.flush()


def test_lost_ranks_lose_no_lines(fed, wanted, models, tmp_path, run):
    ranks, feed, out = fed
    give(feed, LINES[:6])
    ranks.wait_for("rank 1 joins")
    give(feed, LINES[6:20])
    ranks.all[1].send_signal(signal.SIGSTOP)  # it has lines that it will never bring back
    give(feed, LINES[20:26])
    ranks.all[1].kill()
    assert "the others do its prompts" in ranks.wait_for("rank 1 is lost")
    assert ranks.all[1].stderr.read() == "", "only rank 0 tells"
    ranks.all[1] = ranks.start(1)
    ranks.wait_for("rank 1 joins")
    give(feed, LINES[26:38])
    while not out.exists() or len(out.read_text().splitlines()) < 10:
        ranks.told.get(timeout=PATIENCE)
    ranks.all[0].kill()
    error = ranks.all[1].communicate(timeout=PATIENCE)[1]
    assert ranks.all[1].returncode == 2
    assert error.startswith("error: rank 0 is lost (") and error.count("\n") == 1
    # What is there is right, and the rest is made by whoever goes on.
    out.write_bytes(out.read_bytes()[:-9])
    (tmp_path / "in.txt").write_text("\n".join(LINES))
    files = ["--input-file", str(tmp_path / "in.txt"), "--output-file", str(out)]
    status, _, err = run(*models, *SAMPLED, *files, "--resume")
    assert status == 0 and "resuming: " in err
    assert records(out) == wanted


def test_ctrl_c_ends_all_with_one_line(fed):
    ranks, feed, _ = fed
    give(feed, LINES[:6])
    ranks.wait_for("rank 1 joins")
    for process in ranks.all:
        process.send_signal(signal.SIGINT)
    assert ranks.all[1].communicate(timeout=PATIENCE) == ("", "")
    assert ranks.wait_for("interrupted: ")
    assert [process.wait(PATIENCE) for process in ranks.all] == [130, 130]


@pytest.mark.skipif(not LAUNCHER, reason="mlx.launch is not installed")
def test_mlx_launch_shares_a_file_out(wanted, models, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(LINES))
    out = tmp_path / "out.jsonl"
    command = [LAUNCHER, "-n", "2", "--starting-port", str(free_port()), "--"]
    command += [sys.executable, str(ROOT / "main.py"), "--parallel", "data", *models, *SAMPLED]
    command += ["--input-file", str(tmp_path / "in.txt"), "--output-file", str(out), "-v"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # Its input stays open: `mlx.launch` spins where that has ended.
    told, errors = (stream.read() for stream in (process.stdout, process.stderr))
    process.wait(PATIENCE)
    assert records(out) == wanted, told + errors
    assert errors.count("peak memory") == 1, "one rank tells"
    assert "rank 1 joins" in errors and "prompts by rank: 0: " in errors
