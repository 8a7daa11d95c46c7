"""The load command: its figures by the letter, and one small run, not judged by its speed."""

import json

from benchmarks import command_line, printing, server
from benchmarks.server import Measurement


def test_figures_of_literals():
    one = Measurement("batched", 4, 10, 50, [2.0, 4.0, 1.0], [i / 10 for i in range(20)])
    assert one.throughput == 5
    assert (one.percentile(0.5), one.percentile(0.95), one.percentile(1.0)) == (1.0, 1.9, 1.9)


def test_the_table_compares_with_one_at_a_time_repeat_by_repeat():
    single = Measurement("one at a time", 4, 10, 50, [4.0, 2.0, 2.0], [0.5] * 20)
    batched = Measurement("batched", 4, 10, 50, [2.0, 2.0, 0.5], [0.25] * 20, different=1)
    table = printing.markdown(server.COLUMNS, server.table_rows([single, batched]))
    first, second = table.splitlines()[2:]
    speed_up = "1.00 (1.00 to 1.00)"
    assert first == f"| 4 | one at a time | 5.0 | 25 | {speed_up} | 0.500 | 0.500 | equal |"
    speed_up = "2.00 (1.00 to 4.00)"
    assert second == f"| 4 | batched | 5.0 | 25 | {speed_up} | 0.250 | 0.250 | 1 DIFFER |"


def test_a_text_that_changes_is_counted_once(monkeypatch):
    answers = iter(["ab", "ab", "ab", "xb", "ab", "ab"])

    def send_all(address, prompts, clients, options):
        texts = next(answers)
        return 1.0, [1.0], [{"text": t, "stats": {"generated_tokens": 3}} for t in texts]

    monkeypatch.setattr(server, "send_all", send_all)
    addresses = {way: way for way in server.WAYS}
    measured = server.measure(addresses, ["p", "q"], [1], {}, 2)  # each is warmed up first
    assert [one.different for one in measured] == [0, 1]


def test_both_ways_serve_every_client_the_same(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "figures.json"
    argv = ["--clients", "1", "3", "--count", "5", "--repeats", "1", "--json", str(file)]
    assert command_line.main(["server", *argv, "--dtype", "float32"]) == 0
    command, head, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert command.startswith("python benchmark.py server")
    for fact in ("mlx ", "dtype float32", "prompts 5 of mixed", "max_batch 8"):
        assert fact in head
    keys = [(n, way) for n in (1, 3) for way in server.WAYS]
    assert [tuple(row.split(" | ")[:2]) for row in rows] == [(f"| {n}", way) for n, way in keys]
    assert all(row.endswith(" | equal |") for row in rows)
    record = json.loads(file.read_text())
    assert record["command"] == command and record["environment"]["dtype"] == "float32"
    assert [(row["clients"], row["way"]) for row in record["rows"]] == keys
    assert all(len(row["latencies"]) == 5 and row["tokens"] > 20 for row in record["rows"])


def test_different_texts_are_an_exit_status(monkeypatch, capsys):
    def measure(*args):
        ways = server.WAYS
        return [Measurement(w, 1, 1, 1, [1.0], [1.0], int(w == "batched")) for w in ways]

    monkeypatch.setattr(server, "measure", measure)
    monkeypatch.setattr(server, "serving", lambda argv: NoServer())
    monkeypatch.setattr(server, "served_dtype", lambda address: "float32")
    assert command_line.main(["server"]) == 1
    assert "| 1 DIFFER |" in capsys.readouterr().out
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
