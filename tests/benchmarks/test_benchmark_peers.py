"""Tests `peers` with fakes in place of the other programs, and the processes that they run in."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmark
from fake_program import Fake
from mlx_t5.benchmarks import peer_programs, peers
from mlx_t5.benchmarks.peer_process import Process
from mlx_t5.errors import UserError
from snippets import ROOT
from standard_error import without_metal

FAKE = "fake_program:Fake"
OPTIONS = "--count 3 --repeats 1 --max-tokens 6 --num-draft 2 --batch-size 1 3"


@pytest.mark.slow
def test_a_run_in_processes_without_one_program(capfd, tmp_path, monkeypatch):
    """Threads may wait for each other on a busy machine, so each program has one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    programs = {peers.PROJECT: peers.PROGRAMS[peers.PROJECT]}
    monkeypatch.setattr(peers, "PROGRAMS", dict.fromkeys(peers.PROGRAMS, FAKE) | programs)
    file = tmp_path / "figures.json"
    argv = ["peers", *OPTIONS.split(), "--dtype", "float32", "--json", str(file)]
    assert benchmark.main(argv) == 0  # the fakes may differ
    out, _ = capfd.readouterr()
    threads = re.findall(r"\bthreads (\d+)", out)
    assert len(threads) == 2 and len(set(threads)) == 1
    assert out.count("left out: CTranslate2 (no such library; install it)") == 2
    record = json.loads(file.read_text())
    assert record["start_up_seconds"].keys() == {peers.PROJECT, "transformers"}
    assert all(record["start_up_seconds"].values())
    tables = record["tables"]
    assert [table["batch_size"] for table in tables] == [1, 3]
    transformers = [peers.GREEDY, peers.ASSISTED, f"{peers.ASSISTED} 2"]
    for table in tables:
        different = {row["way"]: row["different"] for row in table["rows"]}
        assert different == {"regular": 0, "draft 2": 0, **dict.fromkeys(transformers, 3)}


def test_a_method_runs_in_a_process_with_its_own_environment(capfd):
    with Process(FAKE, {"OMP_NUM_THREADS": "7"}) as process:
        about = process.call("describe")
        assert about["pid"] != os.getpid() and about["threads"] == 7
    assert capfd.readouterr() == ("", "libraries talk\n")  # not part of an answer


def test_an_idle_process_ends_by_itself_and_leaks_nothing():
    """tqdm has a semaphore of multiprocessing, and a killed process would leave it behind."""
    code = "from mlx_t5.benchmarks.peer_process import Process\n"
    code += f"with Process('{FAKE}', {{}}) as process: process.call('describe')"
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, without_metal(done.stderr)) == ("", "libraries talk\n")


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("by raising", "IndexError: list index out of range"),
        ("by being killed", "its process ended with signal 9"),
    ],
)
def test_a_failed_call_raises_one_line(fails, why):
    with Process(FAKE, {}, fails=fails) as process:
        for _ in range(2):  # an exception ends no process
            with pytest.raises(UserError, match=f"^{why}$"):
                process.call("decode", prompts=[[5]], num_draft=0, max_tokens=9, batch_size=1)


def test_a_program_is_warm_when_it_is_timed(monkeypatch):
    """After another program's turn, a program's threads sleep and its caches are cold."""
    now = [0.0]

    class Cold(Fake):
        def decode(self, *args, **keywords):
            now[0] += 1.0 if now[0] else 5.0
            return super().decode(*args, **keywords)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(peer_programs, "time", clock)
    answer = Cold().timed(9, True, prompts=[[5, 6]], num_draft=0, batch_size=1)
    assert answer.seconds == answer.first_seconds == 1.0 and answer.tokens == [[6, 5]]
