"""Tests `compare`: exact tables and small runs. The measured values are not judged."""

import contextlib
import io
import json

import pytest

import benchmark
from benchmarks import compare, figures
from benchmarks.figures import PairCosts
from benchmarks.workload import REGULAR
from mlx_t5.timing import Ratio

SMALL = ["--dtype", "float32", "--repeats", "1"]
COSTS = PairCosts({1: 0.002, 2: 0.003}, {1: 1.0, 2: 1.5}, 0.25)


def test_a_table_as_it_is_printed():
    speeds = {"tokens_per_second": 20.04, "speed_up": Ratio(2, 1, 3), "tokens_per_call": 2.25}
    more = {"acceptance_rate": 0.625, "steps_by_accepted": [1.0, 0.0, 12.5]}
    more["steps_by_length"] = [0.0, 13.5]
    row = {"proposer": "draft", "way": "draft 2", "different": 0, **speeds, **more}
    regular = row | {"proposer": REGULAR, "way": REGULAR, "different": 3}
    table = {"task": "fix", "count": 8, "temp": 0.0, "batch_size": 1, "repeats": 3}
    table |= {"rows": [regular | {"acceptance_rate": None}, row], "costs": COSTS}
    lines = compare.table_text(table, 4_000_000).splitlines()
    assert lines[0] == "fix: 8 prompts, temp 0, batch 1, 3 repeats"
    common = "20 | 2.00 (1.00 to 3.00)"
    assert lines[4] == f"| regular | {common} | 2.25 |  | 1 0 12 | 0 14 | 3 DIFFER |"
    assert lines[5] == f"| draft 2 | {common} | 2.25 | 62.5% | 1 0 12 | 0 14 | equal |"
    assert lines[9:11] == ["| ms | 2.00 | 3.00 |", "| v(M) | 1.00 | 1.50 |"]
    assert lines[12].startswith("c = 0.250;") and lines[12].endswith("4.0 MB of weights, 2.0 GB/s")
    assert len(lines) == 13
    assert compare.table_text(table | {"costs": None}, 0).splitlines() == lines[:6]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Returns the lines of a run, and its tables by temperature, batch size and task."""
    folder = tmp_path_factory.mktemp("compare")
    options = "--num-draft 2 auto --ways draft --task mixed --temp 0 0.7 --batch-size 1 2".split()
    argv = ["compare", "--count", "3", *SMALL, *options, "--json", str(folder / "x.json")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert benchmark.main(argv) == 0
    tables = json.loads((folder / "x.json").read_text())["tables"]
    return out.getvalue().splitlines(), {(t["temp"], t["batch_size"], t["task"]): t for t in tables}


APART = ("translate, in a mixed run", "fix, in a mixed run")
NAMES = ["draft 2", "draft auto"]


@pytest.mark.slow
def test_every_proposer_writes_the_same_texts(comparison):
    lines, tables = comparison
    assert lines[0].startswith("python benchmark.py compare --count 3")
    assert all(fact in lines[1] for fact in ("mlx ", "dtype float32", "prompts 3 of mixed"))
    for task, count in zip(APART, (2, 1), strict=True):
        table = tables[0.0, 1, task]
        assert [row["way"] for row in table["rows"]] == ["regular", *NAMES]
        regular, fixed, *other_rows = table["rows"]
        assert regular["target_calls"] == regular["decided"] == regular["steps_by_accepted"][0]
        assert fixed["target_calls"] == sum(fixed["steps_by_accepted"]) < regular["target_calls"]
        for row in table["rows"]:
            assert row["different"] == 0 and len(row["seconds"][0]) == table["count"] == count
        assert list(table["costs"]["v"]) == [str(m) for m in range(1, 17)]
    # One table per task for greedy texts with batch size 1; one for all tasks otherwise.
    assert sum(line.startswith("| draft auto |") for line in lines) == (2 + 1) + (1 + 1)


@pytest.mark.slow
def test_batches_and_sampled_texts_have_tables_too(comparison):
    _, tables = comparison
    together = tables[0.0, 2, "mixed"]
    assert together["count"] == 3 and together["costs"] is None
    assert {row["different"] for row in together["rows"]} == {0}
    apart = sum(tables[0.0, 1, task]["rows"][0]["decided"] for task in APART)
    assert together["rows"][0]["decided"] == apart
    for batch_size in (1, 2):
        rows = tables[0.7, batch_size, "mixed"]["rows"]
        assert [row["way"] for row in rows] == ["regular", *NAMES]
        assert {row["different"] for row in rows} == {0}


@pytest.mark.slow
def test_different_texts_set_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(figures, "differing", lambda *args: 1)
    argv = "compare --count 2 --num-draft 2 --task fix --ways lookup".split()
    assert benchmark.main([*argv, *SMALL]) == 1
    assert "| 1 DIFFER |" in capsys.readouterr().out


@pytest.mark.slow
def test_less_changed_predictions_need_fewer_passes(tmp_path):
    """The test covers decoding with and without a draft."""
    argv = "compare --count 2 --num-draft 5 --task translate --ways draft --predictions 0 100"
    assert benchmark.main([*argv.split(), *SMALL, "--json", str(tmp_path / "x.json")]) == 0
    (table,) = json.loads((tmp_path / "x.json").read_text())["tables"]
    rows = {row["way"]: row for row in table["rows"]}
    assert {row["different"] for row in rows.values()} == {0}
    for proposer in (REGULAR, "draft"):
        right, wrong = (rows[f"{proposer}, prediction {n} % changed, 5"] for n in (0, 100))
        assert right["acceptance_rate"] == 1
        assert right["target_calls"] < wrong["target_calls"]
