"""`sweep`: a small run and its files. What it measures is not judged."""

import json

import pytest

import benchmark

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_a_small_run(capsys, tmp_path):
    name = tmp_path / "grid"
    argv = ["sweep", "--count", "2", "--quality-count", "4", "--num-draft", "2", "3"]
    argv += ["--delta", "1", "--repeats", "1", "--dtype", "float32", "--output", str(name)]
    assert benchmark.main(argv) == 0
    out = capsys.readouterr().out
    assert "recommended: --" in out and f"wrote {name}.png and {name}.json" in out
    record = json.loads(name.with_suffix(".json").read_text())
    settings = [(row["delta"], row["num_draft"]) for row in record["rows"]]
    assert settings == [(0.0, 2), (0.0, 3), (1.0, 2), (1.0, 3)]  # 0 is always among them
    for row in record["rows"]:
        if row["delta"] == 0:
            assert row["different"] == 0 and row["exact_match_lossless"] == 100.0
        else:
            assert row["alpha"] == 1.0 and row["exact_match"] < 100.0
    assert sum(map(len, record["regular"]["seconds"])) == 2
    assert name.with_suffix(".png").read_bytes().startswith(PNG)
