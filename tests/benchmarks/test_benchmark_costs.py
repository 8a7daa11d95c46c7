"""`costs`: a pass taken apart, by a clock that counts calls, and a small run. No time is judged."""

import itertools
import json

import pytest

import benchmark
from benchmarks import costs
from mlx_t5.backend import mx
from mlx_t5.network.layers import PASSES
from model import LAYERS_AT_ONCE, T5


def test_layers_are_handed_over_after_all_are_described_and_in_decoding_on_the_way(monkeypatch):
    model = costs.small_model("t5-large")
    assert model.config.num_decoder_layers == 24 and model.config.num_heads == 16
    assert model.passes == PASSES, "layers are compiled at once"
    handed_over, given = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (handed_over.append(0), given(*arrays)))
    ticks = itertools.count()
    take_apart = costs.one_pass(model, 5, lambda: (next(ticks), len(handed_over))[1])
    handed_over.clear()
    at_once = 24 // LAYERS_AT_ONCE
    assert take_apart(0) == [0, 1, 0, at_once] and next(ticks) == 5
    monkeypatch.setattr(T5, "decode", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take_apart(0)
    mx.async_eval(mx.zeros(1))
    assert len(handed_over) == 1 + at_once + 1, "the function is back after an error too"


def test_rows_have_the_medians_of_the_passes_that_count(monkeypatch):
    made = []

    def one_pass(model, positions, clock):
        turns = itertools.count(-3)  # three that do not count

        def take_apart(turn):
            made.append((model, positions))
            slower = next(turns) * positions
            return [float(slower + part) for part in range(4)]

        return take_apart

    monkeypatch.setattr(costs, "WARM_UP", 2)
    monkeypatch.setattr(costs, "one_pass", one_pass)
    first, second = costs.measured({"t5-small": "a model"}, 5)
    assert first == {"shape": "t5-small", "positions": 1} | dict(
        zip(costs.PARTS, (2.0, 3.0, 4.0, 5.0), strict=True)
    )
    assert second["positions"] == 5 and second["describing"] == 10.0
    assert sorted(made) == [("a model", n) for n in (1, 5) for _ in range(2 + 1 + 5)]


def test_a_small_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "WARM_UP", 1)
    file = tmp_path / "costs.json"
    argv = ["costs", "--shape", "t5-small", "--repeats", "2", "--json", str(file)]
    assert benchmark.main(argv) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    record = json.loads(file.read_text("utf-8"))
    assert len(table) == 2 + 2 and table[3].startswith("| t5-small | 5 | ")
    assert [row["positions"] for row in record["rows"]] == [1, 5]
    assert all(row[part] >= 0 for row in record["rows"] for part in costs.PARTS)
    assert record["environment"]["mlx"] == mx.__version__
