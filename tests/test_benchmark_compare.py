"""`compare`: its figures by the letter, and small runs. What it measures is not judged."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import command_line, compare
from benchmarks.timing import Timed
from results import Result, Stats

SMALL = ["--dtype", "float32", "--repeats", "1"]


def result(tokens, calls, drafted=0, accepted=0):
    per_call = (len(tokens) + 1) / calls
    stats = Stats(target_calls=calls, drafted=drafted, accepted=accepted, tokens_per_call=per_call)
    return Result(None, tokens, [], "stop", stats)


def timed(seconds, outcomes):
    tokens = [[sum(len(r.tokens) + 1 for r in turn) for turn in row] for row in outcomes]
    return Timed(seconds, tokens, outcomes)


REGULAR = timed([[4.0, 4.0]] * 2, [[[result([5, 6, 7], 4)], [result([8, 9, 9], 4)]]] * 2)


def test_the_figures_of_a_way_are_means_over_its_repeats():
    first = [[result([5, 6, 7], 2, 4, 2)], [result([8, 9, 9], 2, 4, 2)]]
    second = [[result([5, 6, 7], 1, 4, 3)], [result([8, 9, 9], 1, 4, 3)]]
    row = compare.summarise("x", timed([[1.0, 1.0], [3.0, 3.0]], [first, second]), REGULAR, True)
    assert (row["decided"], row["target_calls"], row["accepted"], row["drafted"]) == (8, 3, 5, 8)
    assert row["tokens_per_call"] == 8 / 3 and row["different"] == 0
    assert row["tokens_per_second"] == 2.0 and row["speed_up"].value == 2.0
    assert (row["speed_up"].low, row["speed_up"].high) == (4 / 3, 4.0)
    cells = [write(row) for write in compare.COLUMNS.values()]
    assert cells == ["x", "2.67", "3", "62%", "2", "2.00 (1.33 to 4.00)", "yes"]


def test_a_text_that_differs_in_one_repeat_counts_once():
    good = [[result([5, 6, 7], 4)], [result([8, 9, 9], 4)]]
    bad = [[result([5, 6, 0], 4)], [result([8, 9, 9], 4)]]
    assert compare.differing([good, bad], REGULAR.outcomes) == 1
    assert compare.differing([bad, bad], REGULAR.outcomes) == 1
    assert [compare.same(n) for n in (0, 1, None)] == ["yes", "NO: 1", "sampled"]


def test_auto_is_judged_by_the_best_fixed_number_of_its_own_kind():
    speeds = {
        "regular": 10.0,
        "draft 2": 20.0,
        "draft 5": 40.0,
        "draft 5, token by token": 99.0,
        "draft auto": 30.0,
        "draft+lookup 2": 80.0,
        "lookup auto": 5.0,
    }
    rows = [
        {"way": way, "tokens_per_second": speed, "seconds": [[1 / speed]] * 3, "tokens": [[1]] * 3}
        for way, speed in speeds.items()
    ]
    assert compare.verdicts(rows) == [
        {"way": "draft auto", "best": "draft 5", "of_best": pytest.approx(0.75), "of_regular": 3.0}
    ]


def test_a_lucky_repeat_does_not_make_a_number_the_best():
    def row(*seconds):
        return {"seconds": [[s] for s in seconds], "tokens": [[1]] * len(seconds)}

    steady, lucky = row(1.0, 1.0), row(0.5, 2.0)
    # By its first repeat the lucky one is chosen, and in the second it is slow; then as before.
    assert compare.of_best(steady, [steady, lucky]) == pytest.approx((2.0 + 1.0) / 2)
    assert compare.of_best(row(0.8, 0.8), [steady]) == pytest.approx(1.25)
    assert compare.of_best(row(2.0), [row(1.0)]) == pytest.approx(0.5), "a single repeat"


def test_sampling_compares_both_ways_of_judging():
    subject = SimpleNamespace(regular=lambda: "r", speculative=lambda *args: args)
    ways = compare.decoders(subject, ["draft", "lookup"], [2, "auto"], 0.7)
    assert list(ways) == [
        *("regular", "draft 2", "draft 2, token by token"),
        *("draft auto", "draft auto, token by token", "lookup 2", "lookup auto"),
    ]
    own = {name: options for name, (_, options) in ways.items() if options}
    assert set(own) == {"draft 2, token by token", "draft auto, token by token"}
    assert own["draft 2, token by token"] == {"block_verification": False}
    assert len(compare.decoders(subject, ["draft"], [2], 0.0)) == 2


def test_every_way_writes_the_same(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where auto keeps what it measures
    file = tmp_path / "figures.json"
    argv = ["compare", "--count", "3", "--num-draft", "2", "auto", "--task", "mixed", *SMALL]
    assert command_line.main([*argv, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python benchmark.py compare --count 3") and "mlx" in lines[1]
    record = json.loads(file.read_text())
    sets = {table["set"]: table["count"] for table in record["tables"]}
    assert sets == {"translate, in a mixed run": 2, "fix, in a mixed run": 1}
    ways = [f"{way} {n}" for way in ("draft", "lookup", "draft+lookup") for n in (2, "auto")]
    for table in record["tables"]:
        assert [row["way"] for row in table["rows"]] == ["regular", *ways]
        assert all(row["different"] == 0 for row in table["rows"])
        assert all(len(row["seconds"][0]) == table["count"] for row in table["rows"])
        assert [verdict["way"] for verdict in table["auto"]] == ways[1::2]
    assert [line.split(" | ")[0] for line in lines if line.startswith("| lookup 2")]
    assert any(line.startswith("draft auto: ") for line in lines)


def test_a_larger_batch_and_sampling(capsys, tmp_path):
    file = tmp_path / "figures.json"
    argv = ["compare", "--count", "2", "--num-draft", "2", "--task", "mixed", "--ways", "draft"]
    argv += ["--temp", "0", "0.7", "--batch-size", "2", "--json", str(file), *SMALL]
    assert command_line.main(argv) == 0
    greedy, sampled = json.loads(file.read_text())["tables"]
    assert (greedy["set"], greedy["count"], greedy["batch_size"]) == ("mixed", 2, 2)
    assert [row["different"] for row in greedy["rows"]] == [0, 0]
    assert [row["way"] for row in sampled["rows"]][1:] == ["draft 2", "draft 2, token by token"]
    assert [row["different"] for row in sampled["rows"]] == [None] * 3


def test_a_difference_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(compare, "differing", lambda *args: 1)
    argv = ["compare", "--count", "2", "--num-draft", "2", "--task", "fix", "--ways", "lookup"]
    assert command_line.main([*argv, *SMALL]) == 1
    assert "| NO: 1 |" in capsys.readouterr().out
