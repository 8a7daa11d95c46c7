"""Tests `sweep`: quality, the recommended setting of small grids, and a small run."""

import json

import pytest

import benchmark
from benchmarks.sweep import explain, recommend
from mlx_t5.timing import Ratio

PNG = b"\x89PNG\r\n\x1a\n"


def row(delta, gamma, speed, exact=90.0, chrf=99.0, references=True):
    judged = {"exact_match": exact, "chrf": chrf} if references else {}
    unknown = {"exact_match": None, "chrf": None}
    lossless = {"exact_match_lossless": exact, "chrf_lossless": chrf}
    speed_up = Ratio(speed, speed - 0.1, speed + 0.1)
    setting = {"delta": delta, "num_draft": gamma, "speed_up": speed_up}
    setting["tokens_per_call"] = 2 + delta  # a larger delta keeps more proposals
    return setting | unknown | lossless | judged


SOUND = row(0.0, 3, 1.5)
LENIENT = [SOUND, row(0.5, 3, 2.0, exact=89.5), row(1.0, 3, 3.0, exact=50.0)]
WITHOUT = [  # without references
    row(0.0, 3, 1.5, exact=100.0, chrf=100.0, references=False),
    row(0.5, 3, 2.0, exact=98.0, chrf=99.9, references=False),
]


def gaining(speed):
    """Returns rows with a setting whose slowest repeat, `speed` - 0.1, must gain 2 %."""
    return [row(0.0, 2, 1.5), row(0.0, 3, 2.0), row(0.5, 2, speed), row(0.5, 3, 1.9)]


@pytest.mark.parametrize(
    ("rows", "tolerance", "expected"),
    [
        (LENIENT, 1.0, (0.5, 3)),  # the fastest that keeps its quality
        (LENIENT, 0.1, (0.0, 3)),
        ([SOUND, row(0.5, 3, 2.0, chrf=97.0)], 1.0, (0.0, 3)),  # both measures have to hold
        ([row(0.0, 5, 2.0), row(0.0, 3, 1.97), row(0.0, 2, 1.95)], 1.0, (0.0, 3)),  # the smallest
        *((gaining(speed), 1.0, (0.0, 3)) for speed in (2.03, 2.13)),
        (gaining(2.15), 1.0, (0.5, 2)),
        ([row(0.0, 3, 0.9), row(0.5, 3, 1.2, exact=0.0)], 1.0, None),  # nothing is faster
        (WITHOUT, 1.0, (0.0, 3)),
    ],
)
def test_the_fastest_setting_that_keeps_its_quality_is_recommended(rows, tolerance, expected):
    best = recommend(rows, tolerance)
    assert (best and (best["delta"], best["num_draft"])) == expected
    if expected is None:
        assert "recommended: --regular-decode" in explain(rows, tolerance, 60)
    assert ("against delta 0's texts" in explain(rows, tolerance, 60)) == (rows is WITHOUT)


@pytest.mark.slow
def test_a_small_sweep_is_drawn_and_saved(capsys, tmp_path):
    name = tmp_path / "grid"
    argv = ["sweep", "--count", "2", "--quality-count", "4", "--num-draft", "2", "3"]
    argv += ["--delta", "1", "--repeats", "1", "--dtype", "float32", "--output", str(name)]
    assert benchmark.main(argv) == 0
    out = capsys.readouterr().out
    assert "recommended: --" in out and f"wrote {name}.png and {name}.json" in out
    record = json.loads(name.with_suffix(".json").read_text())
    settings = [(row["delta"], row["num_draft"]) for row in record["rows"]]
    assert settings == [(0.0, 2), (0.0, 3), (1.0, 2), (1.0, 3)]  # delta 0 is always measured
    for row in record["rows"]:
        if row["delta"] == 0:
            assert row["different"] == 0 and row["exact_match_lossless"] == 100.0
        else:
            assert row["acceptance_rate"] == 1.0 and row["exact_match"] < 100.0
    assert sum(map(len, record["regular"]["seconds"])) == 2
    assert name.with_suffix(".png").read_bytes().startswith(PNG)
