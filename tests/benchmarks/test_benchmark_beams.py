"""`beams`: what it makes of times, and a small run. What it measures is not judged."""

import json

import pytest

from benchmarks import beams, command_line
from benchmarks.subject import Run
from mlx_t5.requests import Result, Stats
from mlx_t5.timing import Timed


def timed(seconds, step_seconds, steps):
    """Repeats of one turn of one prompt."""
    runs = [
        [
            Run(
                [Result("", [], [], "stop", Stats(target_calls=steps, decode_seconds=s * steps))],
                {},
                0,
            )
        ]
        for s in step_seconds
    ]
    return Timed([[s] for s in seconds], [[steps]] * len(seconds), runs)


def test_costs_are_those_of_steps_and_of_texts():
    greedy, search = timed([1, 2, 3], [1, 1, 1], 8), timed([3, 4, 3], [2, 3, 1], 10)
    found = beams.costs(search, greedy)
    assert found["milliseconds"] == 2000 and found["steps"] == 10
    assert [found["v"].value, found["v"].low, found["v"].high] == [2, 1, 3]
    assert [found["time"].value, found["time"].low, found["time"].high] == [1.5, 1, 3]


def test_a_small_run(tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    file = tmp_path / "beams.json"
    counts = ["--count", "2", "--quality-count", "2", "--repeats", "1", "--max-tokens", "6"]
    assert command_line.main(["beams", "--num-beams", "3", *counts, "--json", str(file)]) == 0
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert [row["num_beams"] for row in rows] == [1, 3]
    assert all(row["milliseconds"] > 0 and 0 <= row["chrf"] <= 100 for row in rows)
    assert "| K | ms a step |" in capsys.readouterr().out
