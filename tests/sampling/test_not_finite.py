"""A row with NaN or infinite logits ends with an error, and other rows continue."""

import numpy as np
import pytest

from fake_model import FakeModel, drafter, good, greedy, random_table
from mlx_t5.backend import mx
from mlx_t5.decoder import Engine, SpeculativeDecoder
from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError
from mlx_t5.sampling.draws import is_finite, row_key
from mlx_t5.settings import Settings

V = 7
TABLE = random_table(V, eos_bias=-9.0)
BAD, FINE = [5, 6], [3, 4, 2]
NAN, INF = float("nan"), float("inf")
BREAKS = {
    "one NaN": lambda logits: np.where(np.arange(V) == 3, NAN, logits),
    "NaN": lambda logits: np.full(V, NAN),
    "inf": lambda logits: np.where(np.arange(V) == 6, INF, logits),
    "all forbidden": lambda logits: np.full(V, -INF),
}


def breaking(kind, table=TABLE, place=4):
    """Returns a table whose logits are broken after `place` tokens of the bad source."""

    def broken(source, seen):
        logits = table(source, seen)
        bad = source == tuple(BAD) and len(seen) > place
        return (BREAKS[kind](logits) if bad else logits).astype(np.float32)

    return broken


def test_logits_need_a_finite_maximum():
    logits = [[1, -INF, 2], [1, NAN, 2], [1, INF, 2], [-INF] * 3, [INF, -INF, 0], [NAN] * 3]
    assert is_finite(mx.array([logits])).tolist() == [[True] + [False] * 5]


@pytest.mark.parametrize("settings", [{}, {"delta": 1.0}, {"temp": 1.0}, {"temp": 1.0, "delta": 1}])
@pytest.mark.parametrize("num_draft", [0, 3])
@pytest.mark.parametrize("kind", BREAKS)
def test_a_row_whose_logits_break_ends_with_an_error_and_others_go_on(kind, num_draft, settings):
    model = FakeModel(breaking(kind), V)
    engine = Engine(model, drafter(good(TABLE), model))
    settings = Settings(12, num_draft=num_draft, **settings)
    rows = [Row(source, settings, row_key(0, i)) for i, source in enumerate([BAD, FINE])]
    engine.insert(rows)
    while engine.rows:
        engine.step()
    bad, fine = rows
    assert bad.finish_reason == "error"
    assert "after 4 tokens are NaN, infinite or all forbidden; check the weights" in bad.error
    assert bad.decided == 4, "what was written before it is the target's"
    assert (fine.finish_reason, fine.decided) == ("length", 12)
    if not settings.temp and not settings.delta:
        assert bad.tokens[1:] == greedy(FakeModel(TABLE, V), BAD, 4)[0]
        assert fine.tokens[1:] == greedy(model, FINE, 12)[0]


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_draft_that_breaks_decides_nothing(kind, temp, delta):
    """The row is written as if proposals ended where the draft broke, even with delta = 1.

    Greedy rows with delta = 0 may propose the target's own token by chance.
    """
    model = FakeModel(TABLE, V)
    broken = drafter(breaking(kind, good(TABLE), place=0), model)
    options = {"max_tokens": 9, "temp": temp, "delta": delta}
    results = SpeculativeDecoder(model, broken, None, 5).generate([BAD, FINE], **options)
    assert [r.finish_reason for r in results] == ["length", "length"]
    if temp or delta:
        assert results[0].stats.accepted == 0
    assert results[1].stats.accepted > 0
    if temp == 0:
        assert results[0].tokens == greedy(model, BAD, 9)[0]


def spoiled(tokens, logits):
    return logits * NAN if len(tokens) == 3 else logits


def forbidding(tokens, logits):
    return mx.full(logits.shape, -INF)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("processor", [spoiled, forbidding])
def test_a_processor_that_returns_no_number_is_named(processor, temp):
    model = FakeModel(TABLE, V)
    decoder = SpeculativeDecoder(model, drafter(good(TABLE), model), None, 5)
    options = {"temp": temp, "max_tokens": 6, "logits_processors": (processor,)}
    with pytest.raises(UserError, match="check the logits_processors, then the weights"):
        decoder.generate(BAD, **options)
    with pytest.raises(UserError, match="NaN, infinite or all forbidden"):
        list(decoder.stream(BAD, **options))
