"""`sweep`: the files, and a small run. What it measures is not judged."""

import csv
import json

import pytest

import benchmark
from benchmarks import sweep
from mlx_t5.timing import Ratio

PNG = b"\x89PNG\r\n\x1a\n"


def row(delta, gamma, **more):
    speed = Ratio(1.5 + delta, 1.25, 2.5)
    known = {"delta": delta, "num_draft": gamma, "alpha": 0.5, "c": 0.25, "predicted": 1.6}
    judged = {"exact_match": 90.0, "chrf": 98.0}
    judged |= {f"{name}_lossless": 100.0 for name in judged}
    return known | judged | {"speed_up": speed, "decode_speed_up": speed, "seconds": [[1]]} | more


def test_a_line_of_the_sheet_for_each_setting(tmp_path):
    file = tmp_path / "x.csv"
    sweep.write_csv(file, [row(0.0, 1), row(0.5, 2, chrf=None)])
    with open(file, newline="", encoding="utf-8") as stream:
        first, second = csv.DictReader(stream)
    assert (first["delta"], first["num_draft"], first["chrf"]) == ("0.0", "1", "98.0")
    assert [second[f"speed_up{end}"] for end in ("", "_low", "_high")] == ["2.0", "1.25", "2.5"]
    assert second["chrf"] == "" and "seconds" not in first


@pytest.mark.slow
def test_a_small_run(capsys, tmp_path):
    name = tmp_path / "grid"
    argv = ["sweep", "--count", "2", "--quality-count", "4", "--num-draft", "2", "3"]
    argv += ["--delta", "1", "--repeats", "1", "--dtype", "float32", "--output", str(name)]
    assert benchmark.main(argv) == 0
    out = capsys.readouterr().out
    assert "recommended: --" in out and f"wrote {name}.csv, {name}.png" in out
    record = json.loads(name.with_suffix(".json").read_text())
    settings = [(row["delta"], row["num_draft"]) for row in record["rows"]]
    assert settings == [(0.0, 2), (0.0, 3), (1.0, 2), (1.0, 3)]  # 0 is always among them
    for row in record["rows"]:
        if row["delta"] == 0:
            assert row["different"] == 0 and row["exact_match_lossless"] == 100.0
        else:
            assert row["alpha"] == 1.0 and row["exact_match"] < 100.0
    assert sum(map(len, record["regular"]["seconds"])) == 2
    assert len(name.with_suffix(".csv").read_text().splitlines()) == 1 + 4
    assert name.with_suffix(".png").read_bytes().startswith(PNG)
