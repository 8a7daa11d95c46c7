"""The benchmark: its table by the letter, and one small run. What it measures is not judged."""

import json

import benchmark
from benchmark import Measurement


def test_the_table_compares_with_the_first_way_repeat_by_repeat():
    regular = Measurement("regular", 100, 100, 0, 0, True, [4.0, 2.0, 2.0])
    other = Measurement("draft 2", 100, 40, 80, 60, False, [2.0, 2.0, 0.5])
    first, second = benchmark.table([regular, other], greedy=True).splitlines()[2:]
    assert first == "| regular | 1.00 | 100 |  | 50 | 1.00 (1.00 to 1.00) | yes |"
    assert second == "| draft 2 | 2.50 | 40 | 75% | 50 | 2.00 (1.00 to 4.00) | NO |"
    assert benchmark.table([regular], greedy=False).endswith("| sampled |")


def test_every_way_writes_the_same(capsys, tmp_path):
    file = tmp_path / "figures.json"
    argv = ["--count", "2", "--num-draft", "2", "--repeats", "1", "--dtype", "float32"]
    argv += ["--json", str(file)]
    assert benchmark.main(argv) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "fix: 2 held-out prompts" in head and "mlx" in head and "float32" in head
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        f"| {way}" for way in ("regular", "draft 2", "lookup 2", "draft+lookup 2")
    ]
    figures = json.loads(file.read_text())
    assert all(way["same"] and way["target_calls"] > 0 for way in figures)


def test_a_difference_is_an_exit_status(monkeypatch, capsys):
    ways = [
        Measurement("regular", 1, 1, 0, 0, True, [1.0]),
        Measurement("x", 1, 1, 1, 0, False, [1.0]),
    ]
    monkeypatch.setattr(benchmark, "measure", lambda *args: ways)
    assert benchmark.main(["--count", "1", "--num-draft", "2"]) == 1
