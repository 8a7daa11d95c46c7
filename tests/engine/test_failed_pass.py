"""A failed pass never gives a text, though Metal may return zeros before the error."""

import pytest

from fake_model import EOS, FakeModel, drafter, good, random_table, without
from families import SHAPE
from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.model import T5

V = 11
TABLE = random_table(V, eos_bias=0.5)
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3], [7, 2], [8]]
TOLD = r"the last pass failed \(Insufficient Memory\); decode fewer texts at a time"


class Failing:
    """Stands in for `mx.synchronize`; one call fails after `after` successful calls."""

    def __init__(self, monkeypatch, after):
        self.countdown, self.own = after, mx.synchronize
        monkeypatch.setattr(mx, "synchronize", self)

    def __call__(self):
        self.countdown -= 1
        if self.countdown == -1:
            raise RuntimeError("Insufficient Memory")
        self.own()


def decoder_of(kind):
    model = FakeModel(TABLE, V)
    return SpeculativeDecoder(model, drafter(good(TABLE), model) if kind == "drafted" else None)


@pytest.mark.parametrize("kind", ["drafted", "regular", "beams"])
def test_all_rows_of_a_failed_pass_are_errors_and_later_ones_are_right(monkeypatch, kind):
    how = {"batch_size": 2, "max_tokens": 9, "num_beams": 3 if kind == "beams" else 1}
    expected = decoder_of(kind).generate(SOURCES, **how)
    assert all(result.tokens or result.finish_reason == "stop" for result in expected)
    Failing(monkeypatch, after=1)  # the first two rows have joined
    results = decoder_of(kind).generate(SOURCES, **how)
    failed = [result for result in results if result.error]
    assert len(failed) == 2, "the row that has ended, and the one beside it"
    for result in failed:
        assert result.finish_reason == "error" and not result.tokens and result.text is None
    for result, own in zip(results, expected, strict=True):
        assert result.error or result.tokens == own.tokens
    monkeypatch.undo()
    Failing(monkeypatch, after=1)
    with pytest.raises(UserError, match=TOLD):
        decoder_of(kind).generate(SOURCES[0], max_tokens=1)


def test_a_stream_ends_in_the_error(monkeypatch):
    Failing(monkeypatch, after=1)
    model = FakeModel(without(TABLE, EOS), V)
    chunks = SpeculativeDecoder(model).stream(SOURCES[0], max_tokens=3)
    assert [next(chunks).result, next(chunks).result] == [None, None]
    with pytest.raises(UserError, match=TOLD):
        next(chunks)


@pytest.mark.parametrize("what", ["score", "embed"])
def test_scores_and_vectors_of_a_failed_pass_are_made_again(monkeypatch, what):
    decoder = SpeculativeDecoder(T5(T5Config.from_dict({"model_type": "t5", **SHAPE})))
    more = [[[4, 1]] * 2] if what == "score" else []
    make = getattr(decoder, what)
    expected = make(SOURCES[:2], *more)
    Failing(monkeypatch, after=0)
    results = make(SOURCES[:2], *more)
    for one, other in zip(results, expected, strict=True):
        if what == "score":
            assert one.error is None and one.logprob == pytest.approx(other.logprob, abs=1e-4)
        else:
            assert one == pytest.approx(other, abs=1e-4)
    Failing(monkeypatch, after=0)
    with pytest.raises(UserError, match="no memory for a prompt.* .Insufficient Memory."):
        make(SOURCES[0], *more[:1] and [[4, 1]])
