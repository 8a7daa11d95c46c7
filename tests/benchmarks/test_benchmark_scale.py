"""`scale`: its model of a step by literals, and a small run. What it measures is not judged."""

import json
import time

import pytest

from benchmarks import command_line, scale, scale_drafts, scale_tensor
from benchmarks.peer_process import Process
from benchmarks.scale_drafts import EVERY, FIRST
from benchmarks.scale_processes import together
from benchmarks.scaling import Link, fitted, step_seconds
from mlx_t5.errors import UserError
from mlx_t5.timing import Ratio, Timed


def test_a_step_takes_its_own_work_and_the_hops_of_its_collectives():
    link = Link(latency=2.0, bandwidth=100.0)
    assert link.gather_seconds(2, 0) == 2.0 and link.gather_seconds(1, 500) == 0.0
    assert link.gather_seconds(4, 100) == 9.0
    assert step_seconds(5.0, 2, [100, 200], link) == 5.0 + 3.0 + 4.0


def test_a_link_is_found_by_what_gathering_takes():
    link = Link(latency=3e-5, bandwidth=2e9)
    for ranks in (2, 4):
        found = fitted({n: link.gather_seconds(ranks, n) for n in scale_tensor.SIZES}, ranks)
        assert found.latency == pytest.approx(3e-5) and found.bandwidth == pytest.approx(2e9)


def test_states_are_exchanged_and_logits_last():
    sizes = {"collectives": 3, "state": 8, "logits": 100}
    assert scale_tensor.exchanged(sizes, 5) == [40, 40, 500]
    assert scale_tensor.exchanged({**sizes, "collectives": 0}, 5) == []


def test_the_figures_of_ranks_are_those_of_their_repeats():
    def run(seconds, tokens):
        latencies = [0.1 * i for i in range(1, 11)]
        return {"seconds": seconds, "tokens": tokens, "latencies": latencies, "by_rank": [1, 1]}

    base = [run(4.0, [[1], [2, 3]]), run(8.0, [[1], [2, 3]])]
    row = scale.data_row(2, [run(2.0, [[1], [2, 3]]), run(2.0, [[1], [9]])], base, 1)
    assert row["speed_up"] == Ratio(3.0, 2.0, 4.0)
    assert (row["tokens_per_second"], row["different"]) == (1.5, 1)
    assert (row["p50"], row["p95"]) == (pytest.approx(0.6), pytest.approx(1.0))
    step = scale_tensor.step_row([1.0, 3.0], [4.0, 4.0], [1.0, 1.0])
    assert (step["seconds"], step["work"], step["share"]) == (4.0, 1.0, 0.75)


def test_memory_is_set_beside_a_share_of_the_weights_and_what_all_have():
    whole = {"shared.weight": 100, "q": 300, "lm_head": 60}
    part = {"shared.weight": 100, "q": 100, "lm_head": 20}
    found = [{"weights": part, "peak": peak} for peak in (210, 231, 220)]
    row = scale_tensor.memory_row(whole, found)
    assert row == {"ranks": 3, "weights": 460, "common": 100, "promised": 220.0, "peak": 231}
    alone = scale_tensor.memory_row(whole, [{"weights": whole, "peak": 500}])
    assert (alone["common"], alone["promised"]) == (0, 460)


def test_texts_of_every_rank_are_judged_by_those_of_one():
    def timed(seconds, *prompts):
        outcomes = [{"tokens": t, "decode_seconds": 0.6, "steps": 3} for t in prompts]
        return Timed([[seconds, seconds]] * 2, [[1, 2]] * 2, [outcomes] * 2)

    found = {
        (1, FIRST): timed(6.0, [[5]], [[6, 7]]),
        (2, FIRST): timed(4.0, [[5]], [[6, 8]]),
        (2, EVERY): timed(2.0, [[5], [4]], [[6, 7], [6, 7]]),
    }
    alone, first, every = scale_drafts.rows_of(found, cores=1)
    assert (alone["tokens_per_second"], alone["step"]) == (3 / 12, pytest.approx(0.2))
    assert (first["speed_up"].value, first["beside"]) == (1.5, None)
    assert (every["speed_up"].value, every["beside"]) == (3.0, Ratio(2.0, 2.0, 2.0))
    assert [(r["different"], r["apart"]) for r in (alone, first, every)] == [(0, 0), (1, 0), (1, 2)]


def test_a_rank_that_fails_ends_those_that_wait_for_it():
    fake, call = "fake_program:Fake", {"prompts": [], "num_draft": 0, "max_tokens": 9}
    began = time.monotonic()
    with (
        Process(fake, {}, fails="by sleeping") as one,
        Process(fake, {}, fails="by raising") as two,
    ):
        with pytest.raises(UserError, match="IndexError: list index out of range"):
            together([one, two], "decode", batch_size=1, **call)
        with pytest.raises(UserError, match="signal 9"):
            one.call("describe")
    assert time.monotonic() - began < 300  # it sleeps for 600


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
    assert [(row["ranks"], row["width"]) for row in found["steps"]] == [
        (n, width) for n in (1, 2) for width in scale_tensor.WIDTHS
    ]
    assert all(row["collectives"] > 0 for row in found["steps"] if row["ranks"] == 2)
    one, two = found["memory"]
    assert one["promised"] == one["weights"] == two["weights"] < one["peak"]
    assert two["common"] < two["promised"] < two["peak"]
    ways = [(row["ranks"], row["draft_on"]) for row in found["texts"]]
    assert ways == [(1, FIRST), (2, FIRST), (2, EVERY)]
    assert not any(row["different"] or row["apart"] for row in found["texts"])
    assert all(row["step"] > 0 and row["draft_bytes"] > 1e6 for row in found["texts"])
    out = capsys.readouterr().out
    assert "cores" in out and "Other links" in out and "on every rank" in out
