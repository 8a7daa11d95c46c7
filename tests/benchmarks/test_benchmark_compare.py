"""Tests `compare`: exact tables and small runs. The measured values are not judged."""

import json

import pytest

import benchmark
from benchmarks import figures

SMALL = ["--dtype", "float32", "--repeats", "1"]


@pytest.mark.slow
def test_every_proposer_writes_the_same_texts(tmp_path, capsys):
    options = "--num-draft 2 auto --ways draft --task mixed --temp 0 0.7 --batch-size 1 2".split()
    file = tmp_path / "x.json"
    argv = ["compare", "--count", "3", *SMALL, *options, "--json", str(file)]
    assert benchmark.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python benchmark.py compare --count 3")
    assert all(fact in lines[1] for fact in ("mlx ", "dtype float32", "prompts 3 of mixed"))
    tables = json.loads(file.read_text())["tables"]
    assert len(tables) == (2 + 1) + (1 + 1)  # one a task for greedy texts with batch size 1
    assert sum(line.startswith("| draft auto |") for line in lines) == len(tables)
    for table in tables:
        assert [row["way"] for row in table["rows"]] == ["regular", "draft 2", "draft auto"]
        assert {row["different"] for row in table["rows"]} == {0}
        if table["temp"] == 0 and table["batch_size"] == 1:
            regular, fixed, _ = table["rows"]
            assert regular["target_calls"] == regular["decided"] == regular["steps_by_accepted"][0]
            assert fixed["target_calls"] == sum(fixed["steps_by_accepted"])
            assert fixed["target_calls"] < regular["target_calls"]


@pytest.mark.slow
def test_different_texts_set_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(figures, "differing", lambda *args: 1)
    argv = "compare --count 2 --num-draft 2 --task fix --ways lookup".split()
    assert benchmark.main([*argv, *SMALL]) == 1
    assert "| 1 DIFFER |" in capsys.readouterr().out
