"""`scale`: its model of a step by literals, and a small run. What it measures is not judged."""

import json

import pytest

from benchmarks import command_line, scale
from benchmarks.scaling import Link, fitted, step_seconds
from mlx_t5.timing import Ratio


def test_a_step_takes_its_own_work_and_the_hops_of_its_collectives():
    link = Link(latency=2.0, bandwidth=100.0)
    assert link.gather_seconds(2, 0) == 2.0 and link.gather_seconds(1, 500) == 0.0
    assert link.gather_seconds(4, 100) == 9.0
    assert step_seconds(5.0, 2, [100, 200], link) == 5.0 + 3.0 + 4.0


def test_a_link_is_found_by_what_gathering_takes():
    link = Link(latency=3e-5, bandwidth=2e9)
    for ranks in (2, 4):
        found = fitted({n: link.gather_seconds(ranks, n) for n in scale.SIZES}, ranks)
        assert found.latency == pytest.approx(3e-5) and found.bandwidth == pytest.approx(2e9)


def test_states_are_exchanged_and_logits_last():
    sizes = {"collectives": 3, "state": 8, "logits": 100}
    assert scale.exchanged(sizes, 5) == [40, 40, 500]
    assert scale.exchanged({**sizes, "collectives": 0}, 5) == []


def test_the_figures_of_ranks_are_those_of_their_repeats():
    def run(seconds, tokens):
        latencies = [0.1 * i for i in range(1, 11)]
        return {"seconds": seconds, "tokens": tokens, "latencies": latencies, "by_rank": [1, 1]}

    base = [run(4.0, [[1], [2, 3]]), run(8.0, [[1], [2, 3]])]
    row = scale.data_row(2, [run(2.0, [[1], [2, 3]]), run(2.0, [[1], [9]])], base, 1)
    assert row["speed_up"] == Ratio(3.0, 2.0, 4.0)
    assert (row["tokens_per_second"], row["different"]) == (1.5, 1)
    assert (row["p50"], row["p95"]) == (pytest.approx(0.6), pytest.approx(1.0))
    step = scale.tensor_row([1.0, 3.0], [4.0, 4.0], [1.0, 1.0])
    assert (step["seconds"], step["work"], step["share"]) == (4.0, 1.0, 0.75)


def test_links_have_two_figures(capsys):
    assert command_line.main(["scale", "--latency", "50"]) == 2
    assert "give as many of both" in capsys.readouterr().err


def test_a_small_run(tmp_path, capsys):
    file = tmp_path / "scale.json"
    small = ["--count", "4", "--repeats", "1", "--max-tokens", "8", "--batch-size", "1"]
    argv = ["scale", "--ranks", "1", "2", *small, "--json", str(file)]
    assert command_line.main([*argv, "--latency", "50", "--bandwidth", "5"]) == 0
    found = json.loads(file.read_text("utf-8"))
    assert [row["ranks"] for row in found["data"]] == [1, 2]
    assert [sum(row["by_rank"]) for row in found["data"]] == [4, 4]
    assert [(row["ranks"], row["width"]) for row in found["tensor"]] == [
        (n, width) for n in (1, 2) for width in scale.WIDTHS
    ]
    assert all(row["collectives"] > 0 for row in found["tensor"] if row["ranks"] == 2)
    out = capsys.readouterr().out
    assert "cores" in out and "Other links" in out
