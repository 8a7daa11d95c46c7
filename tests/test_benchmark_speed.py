"""`speed`: its figures by the letter, and a small run. What it measures is not judged."""

import json
from collections import Counter

import pytest

from benchmarks import command_line, speed
from benchmarks.costs import Costs
from benchmarks.speed import Run
from benchmarks.subject import Passes
from benchmarks.timing import Ratio, Timed
from results import Result, Speculation, Stats

COSTS = Costs({1: 2.0, 3: 3.0}, {1: 1.0, 3: 1.5}, {2: 0.25, 4: 0.5})


def turn(tokens, calls, decode, widths, draft_passes=0, counts=((), ())):
    told = Speculation(drafted_by_position=counts[0], accepted_by_position=counts[1])
    stats = Stats(
        target_calls=calls,
        tokens_per_call=len(tokens) / calls,
        encode_seconds=0.5,
        decode_seconds=decode,
        peak_memory_bytes=7,
        speculation=told,
    )
    result = Result(None, tokens[:-1], [], "stop", stats)
    return Run([result], Counter(widths), draft_passes)


def timed(rows):
    seconds = [[run.results[0].stats.decode_seconds + 0.5 for run in row] for row in rows]
    tokens = [[len(run.results[0].tokens) + 1 for run in row] for row in rows]
    return Timed(seconds, tokens, rows)


REGULAR = timed([[turn([5, 6, 7, 1], 4, 7.5, {1: 4})]] * 3)
FASTER = timed([[turn([5, 6, 7, 1], 2, s, {3: 2}, 4, ([2, 2], [2, 0]))] for s in (1.5, 2.5, 3.5)])


def test_encoding_and_decoding_are_timed_apart():
    row = speed.times(FASTER, REGULAR)
    assert row["encode_ms"] == Ratio(500.0, 500.0, 500.0)
    assert row["decode_ms"] == Ratio(625.0, 375.0, 875.0)
    assert row["decode_speed_up"] == Ratio(3.0, 7.5 / 3.5, 5.0)
    assert row["speed_up"] == Ratio(8 / 3, 2.0, 4.0)
    assert row["tokens_per_second"] == 4 / 3
    assert (row["different"], row["peak_memory_bytes"]) == (0, 7)
    assert row["decode_seconds"] == [[1.5], [2.5], [3.5]]


def test_a_text_that_differs_is_counted():
    other = timed([[turn([5, 6, 8, 1], 2, 1.0, {3: 2})]] * 3)
    assert speed.times(other, REGULAR)["different"] == 1


def test_the_weights_of_both_models_are_read_by_each_of_their_passes():
    row = speed.bandwidth(FASTER, target=100, draft=10)
    assert row["bytes_per_token"] == (2 * 100 + 4 * 10) / 4
    assert row["bandwidth"] == 60 / 0.625
    assert speed.bandwidth(REGULAR, 100, 10)["bytes_per_token"] == 100


def test_predictions_follow_from_counts_and_costs():
    row = speed.prediction(FASTER, COSTS, "2")
    alpha = 2 / 4  # all first proposals kept, no second one
    assert (row["alpha"], row["c"], row["v"], row["tokens_per_call"]) == (alpha, 0.25, 1.5, 2.0)
    assert row["predicted"] == pytest.approx((1 + alpha + alpha**2) / (2 * 0.25 + 1.5))
    assert row["predicted_by_calls"] == pytest.approx(2.0 / (2 * 0.25 + 1.5))
    assert speed.prediction(FASTER, COSTS, "auto")["c"] == 0.5
    copied = timed([[turn([5, 6, 7, 1], 2, 1.0, {3: 2}, 0, ([2], [2]))]])
    assert speed.prediction(copied, COSTS, "2")["c"] == 0.0


def test_passes_are_counted_by_turn():
    class Model:
        def decode(self, tokens, cache, offsets):
            return tokens

    class Tokens:
        shape = (1, 3)

    target, draft = Passes(Model()), Passes(Model())

    def decode(turn):
        for _ in range(turn + 1):
            target.decode(Tokens, None, None)
        draft.decode(Tokens, None, None)
        return []

    run = speed.counting(decode, target, draft)
    first, second = run(0), run(1)
    assert (first.widths, second.widths) == (Counter({3: 1}), Counter({3: 2}))
    assert first.draft_passes == second.draft_passes == 1


def test_a_small_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed, "copy_bandwidth", lambda: [1e9, 2e9, 3e9])
    file = tmp_path / "figures.json"
    argv = ["speed", "--count", "2", "--repeats", "1", "--num-draft", "2", "auto"]
    argv += ["--task", "fix", "--dtype", "float32", "--json", str(file)]
    assert command_line.main(argv) == 0
    out = capsys.readouterr().out
    assert "copying a large array: 2.00 (1.00 to 3.00) GB/s" in out
    assert "| M = 16 |" in out and "with 2 proposals" in out
    assert "one position: " in out and " after 16, " in out and " after 511 tokens; " in out
    record = json.loads(file.read_text())
    assert [row["way"] for row in record["rows"]] == ["regular", "draft 2", "draft auto"]
    regular, fixed, _ = record["rows"]
    assert all(row[key] for row in record["rows"] for key in ("machine", "mlx", "dtype", "set"))
    assert regular["target_calls"] == regular["decided"] > fixed["target_calls"]
    # In the bundled folders a regular pass reads 14.2 MB in float32; every row shows what it did.
    assert 14e6 < regular["bytes_per_token"] < 14.5e6
    assert set(fixed["widths"]) <= {"1", "2", "3"} and fixed["draft_passes"] > 0
    # All but the steps of a text whose end is near verify three positions.
    assert fixed["widths"]["3"] == fixed["target_calls"]
    costs = record["sets"][0]["costs"]
    assert len(costs["v"]) == 16 and list(costs["places"]) == ["16", "128", "256", "384", "511"]
    rows = [line for line in out.splitlines() if line.startswith("| Linux") or "2 fix" in line]
    assert len(rows) == 3 + 2
