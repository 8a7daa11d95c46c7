"""The load command: its figures by the letter, and one small run, not judged by its speed."""

import json

from benchmarks import command_line, server
from benchmarks.server import Measurement


def test_figures_of_literals():
    one = Measurement("batched", 4, 10, 50, [2.0, 4.0, 1.0], [i / 10 for i in range(20)])
    assert one.throughput == 5
    assert (one.percentile(0.5), one.percentile(0.95), one.percentile(1.0)) == (1.0, 1.9, 1.9)


def test_the_table_compares_with_one_at_a_time_repeat_by_repeat():
    single = Measurement("one at a time", 4, 10, 50, [4.0, 2.0, 2.0], [0.5] * 20)
    batched = Measurement("batched", 4, 10, 50, [2.0, 2.0, 0.5], [0.25] * 20)
    row = server.table([single, batched]).splitlines()[2]
    assert row == (
        "| 4 | 5.0 | 25 | 0.500 s | 0.500 s | 5.0 | 25 | 0.250 s | 0.250 s | 2.00× (1.00 to 4.00) |"
    )


def test_both_ways_serve_every_client_the_same(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "figures.json"
    argv = ["--clients", "1", "3", "--requests", "5", "--repeats", "1", "--json", str(file)]
    assert command_line.main(["server", *argv, "--dtype", "float32"]) == 0
    command, head, *rows, last = capsys.readouterr().out.splitlines()
    assert command.startswith("python benchmark.py server")
    assert "demo, 5 held-out prompts" in head and "mlx" in head and "float32" in head
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| 1", "| 3"]
    assert last == "all texts equal: yes"
    record = json.loads(file.read_text())
    assert record["machine"] == f"{command}\n{head}"
    assert [(m["clients"], m["way"]) for m in record["measurements"]] == [
        (n, way) for n in (1, 3) for way in server.WAYS
    ]
    assert all(len(m["latencies"]) == 5 and m["tokens"] > 20 for m in record["measurements"])


def test_different_texts_are_an_exit_status(monkeypatch, capsys):
    def measure(*args):
        return [Measurement(w, 1, 1, 1, [1.0], [1.0], same=w != "batched") for w in WAYS]

    WAYS = server.WAYS
    monkeypatch.setattr(server, "measure", measure)
    monkeypatch.setattr(server, "serving", lambda argv: NoServer())
    monkeypatch.setattr(server, "describe", lambda address, args: "machine")
    assert command_line.main(["server"]) == 1
    assert "equal: NO" in capsys.readouterr().out
    assert command_line.main(["server", "--temp", "1", "--num-draft", "auto"]) == 0


class NoServer:
    """Stands for a running server."""

    def __enter__(self):
        return "nowhere"

    def __exit__(self, *_):
        pass


def test_a_server_that_does_not_start_is_one_line(capsys):
    assert command_line.main(["server", "--model", "no/such/folder"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no model folder no/such/folder")
