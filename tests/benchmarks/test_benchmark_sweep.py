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


def picture(rows, best):
    """The axes of the picture, before it is written."""
    from matplotlib.figure import Figure

    left, right = Figure().subplots(1, 2)
    sweep._speeds(left, rows, best)
    sweep._qualities(right, rows)
    return left, right


def test_the_picture_shows_measured_and_predicted_speed_and_quality(tmp_path):
    rows = [row(delta, gamma) for delta in (0.0, 0.5) for gamma in (1, 2, 3)]
    speeds, qualities = picture(rows, rows[4])
    names = [text.get_text() for text in speeds.get_legend().get_texts()]
    assert set(names) == {"δ = 0", "δ = 0.5", "theory", "recommended"}
    theory = [line for line in speeds.get_lines() if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in theory if len(line.get_xdata())] == [[1.6] * 3] * 2
    marked = next(line for line in speeds.get_lines() if line.get_label() == "recommended")
    assert round(marked.get_xdata()[0]) == 2 and marked.get_ydata()[0] == 2.0
    lines = {line.get_label(): list(line.get_ydata()) for line in qualities.get_lines()}
    assert lines["exact match, references"] == [90.0, 90.0] and len(lines) == 4
    _, qualities = picture([row(0.0, 1, exact_match=None, chrf=None)], None)
    names = {line.get_label() for line in qualities.get_lines()}  # what is unknown is not drawn
    assert names == {"exact match, δ = 0", "chrF, δ = 0"}
    sweep.draw(rows, None, "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


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
