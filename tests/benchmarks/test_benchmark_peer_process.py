"""Tests calls to other processes: their answers, and how the processes end."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.peer_process import Process
from mlx_t5.errors import UserError
from serving_process import ROOT

FAKE = "fake_program:Fake"
CALL = {"prompts": [[5, 6]], "num_draft": 0, "max_tokens": 9, "batch_size": 1}


def ended(pid: int) -> bool:
    """Returns whether a process ends within 30 seconds, which suffice on a busy machine."""
    for _ in range(300):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_method_runs_in_a_process_with_its_own_environment(capfd):
    with Process(FAKE, {"OMP_NUM_THREADS": "7"}) as process:
        about = process.call("describe")
        assert about["pid"] != os.getpid() and about["threads"] == 7
        assert process.call("decode", **CALL) == [[6, 5]]
        assert process.call("encode", texts=["été"]) == [[3, 1]]
    assert ended(about["pid"])
    assert capfd.readouterr() == ("", "libraries talk\n")  # not part of an answer


def test_a_process_loads_no_library_that_its_program_does_not():
    with Process(FAKE, {}) as process:
        modules = set(process.call("modules"))
    assert "fake_program" in modules
    assert not modules & {"mlx", "numpy", "torch", "transformers", "ctranslate2"}


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("at start", "no such library; install it"),
        ("at import", "no_such_library is not installed; pip install -r requirements.txt"),
        ("by raising", "IndexError: list index out of range"),
        ("by dying", "its process ended with status 3"),
        ("by being killed", "its process ended with signal 9"),
    ],
)
def test_a_failed_call_raises_one_line(fails, why):
    with Process(FAKE, {}, fails=fails) as process:
        for _ in range(1 if fails.startswith("at ") else 2):  # an exception ends no process
            with pytest.raises(UserError) as caught:
                process.call("decode", **CALL)
            assert str(caught.value) == why


@pytest.mark.slow
def test_a_process_ends_with_its_parent():
    code = (
        "from benchmarks.peer_process import Process\nimport os, signal\n"
        f"print(Process({FAKE!r}, {{}}).call('describe')['pid'], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "benchmarks")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert ended(int(done.stdout)), done.stderr
