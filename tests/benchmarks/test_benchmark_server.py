"""Tests the load command: exact figures and one small run. No speed is judged."""

import contextlib
import json

import pytest

import benchmark
from benchmarks import server
from benchmarks.server import Measurement
from mlx_t5.timing import Timed


@pytest.mark.slow
def test_both_servers_send_every_client_the_same_text(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "figures.json"
    argv = ["--clients", "1", "3", "--count", "5", "--repeats", "1", "--num-draft", "5"]
    argv += ["--json", str(file)]
    assert benchmark.main(["server", *argv, "--dtype", "float32"]) == 0
    command, head, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert command.startswith("python benchmark.py server")
    for fact in ("mlx ", "dtype float32", "prompts 5 of mixed", "max_batch 8"):
        assert fact in head
    keys = [(n, name) for n in (1, 3) for name in server.SERVERS]
    assert [tuple(row.split(" | ")[:2]) for row in rows] == [(f"| {n}", name) for n, name in keys]
    assert all(row.endswith(" | equal |") for row in rows)
    record = json.loads(file.read_text())
    assert record["command"] == command and record["environment"]["dtype"] == "float32"
    assert [(row["clients"], row["way"]) for row in record["rows"]] == keys
    assert all(len(row["latencies"]) == 5 and row["tokens"][0] > 20 for row in record["rows"])


def test_different_texts_set_the_exit_status(monkeypatch, capsys):
    def measure(*args):
        texts = {server.SINGLE: "a", server.BATCHED: "b"}
        return {
            (1, name): Measurement(Timed([[1.0]], [[1]], [[[text]]]), [1.0])
            for name, text in texts.items()
        }

    monkeypatch.setattr(server, "measure", measure)
    monkeypatch.setattr(server, "serving", lambda argv: contextlib.nullcontext("nowhere"))
    monkeypatch.setattr(server, "served_dtype", lambda address: "float32")
    assert benchmark.main(["server"]) == 1
    assert "| 1 DIFFER |" in capsys.readouterr().out
