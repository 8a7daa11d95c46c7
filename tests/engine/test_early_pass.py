"""Regular decoding begins a pass before the last token is read, which changes no text."""

import numpy as np
import pytest

import decoder
from fake_model import EOS, FakeModel, drafter, random_table, without
from mlx_t5.decoder import Engine, SpeculativeDecoder
from mlx_t5.engine.rows import Row
from mlx_t5.network.interface import WeightsRead
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings

V = 7
TABLE = random_table(V, eos_bias=0.3)
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3]]


@pytest.fixture
def early(monkeypatch):
    """Makes the code behave as on a GPU."""
    monkeypatch.setattr(decoder, "cpu_only", lambda: False)


def positions(model):
    return [offsets for offsets, _ in model.calls]


def rows(sources, **settings):
    return [Row(list(s), Settings(**settings), row_key(0, i)) for i, s in enumerate(sources)]


@pytest.mark.parametrize(
    ("proposals", "fed"), [("none", [[0], [1]]), ("drafted", [[0]]), ("predicted", [[0]])]
)
def test_a_pass_prefetches_only_without_proposals(early, proposals, fed):
    model = FakeModel(without(TABLE, EOS), V)
    engine = Engine(model, drafter(TABLE, model) if proposals == "drafted" else None)
    (row,) = inserted = rows(SOURCES[:1], max_tokens=9, num_draft=5)
    row.prediction = [3, 4] if proposals == "predicted" else []
    engine.insert(inserted)
    engine.step()
    assert positions(model) == fed


def test_nothing_is_fed_past_max_tokens_and_one_pass_past_the_end_token(early):
    endless = FakeModel(without(TABLE, EOS), V)
    assert SpeculativeDecoder(endless).generate(SOURCES[1], max_tokens=6).stats.target_calls == 6
    assert positions(endless) == [[i] for i in range(6)]

    ending = FakeModel(lambda source, seen: np.eye(V)[EOS if len(seen) == 3 else 4], V)
    result = SpeculativeDecoder(ending).generate(SOURCES[1], max_tokens=6)
    assert (result.tokens, result.stats.target_calls) == ([4, 4], 3)
    assert positions(ending) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(("size", "fed"), [(decoder.SMALL_WEIGHTS, 2), (5 * 10**8, 1)])
def test_a_cpu_begins_passes_of_small_weights_early(monkeypatch, size, fed):
    monkeypatch.setattr(decoder, "cpu_only", lambda: True)
    model = FakeModel(without(TABLE, EOS), V)
    model.weights_read = lambda: WeightsRead(12, size, "float32")
    engine = Engine(model)
    engine.insert(rows(SOURCES[:1], max_tokens=9))
    engine.step()
    assert len(positions(model)) == fed


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_early_passes_change_nothing_when_rows_join_and_leave(early, monkeypatch, temp):
    def run():
        engine = Engine(FakeModel(TABLE, V), None)
        every = waiting = rows(SOURCES * 3, max_tokens=9, temp=temp)
        for steps in (2, 1, 3, 1, 0, 2, 1, 4, 3, 1, 1, 30):
            engine.insert(waiting[:1])
            waiting = waiting[1:]
            for _ in range(steps):
                if engine.rows:
                    engine.step()
        assert not engine.rows
        return [row.tokens for row in every]

    early_texts = run()
    monkeypatch.setattr(decoder, "cpu_only", lambda: True)
    assert early_texts == run()
