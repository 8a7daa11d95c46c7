"""Tests calls to other processes: their answers, and how the processes end."""

import os

import pytest

from benchmarks.peer_process import Process
from mlx_t5.errors import UserError

FAKE = "fake_program:Fake"
CALL = {"prompts": [[5, 6]], "num_draft": 0, "max_tokens": 9, "batch_size": 1}


def test_a_method_runs_in_a_process_with_its_own_environment(capfd):
    with Process(FAKE, {"OMP_NUM_THREADS": "7"}) as process:
        about = process.call("describe")
        assert about["pid"] != os.getpid() and about["threads"] == 7
        assert process.call("decode", **CALL) == [[6, 5]]
        assert process.call("encode", texts=["été"]) == [[3, 1]]
    assert capfd.readouterr() == ("", "libraries talk\n")  # not part of an answer


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("at start", "no such library; install it"),
        ("at import", "no_such_library is not installed; pip install -r requirements.txt"),
        ("by raising", "IndexError: list index out of range"),
        ("by being killed", "its process ended with signal 9"),
    ],
)
def test_a_failed_call_raises_one_line(fails, why):
    with Process(FAKE, {}, fails=fails) as process:
        for _ in range(1 if fails.startswith("at ") else 2):  # an exception ends no process
            with pytest.raises(UserError) as caught:
                process.call("decode", **CALL)
            assert str(caught.value) == why
