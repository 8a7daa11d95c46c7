"""Top-k and top-p look at the likeliest tokens only, but keep exactly the right tokens.

The expected nuclei are computed in float64 from the whole sorted vocabulary. `CANDIDATES` is
made small, so that small vocabularies exceed it.
"""

import numpy as np
import pytest

from draws import check_draws, keys, many_keys, mixed, position_keys
from fake_model import FakeModel, drafter, good, random_table
from mlx_t5.backend import mx
from mlx_t5.decoder import Engine, SpeculativeDecoder
from mlx_t5.engine.rows import Row
from mlx_t5.sampling import draws
from mlx_t5.sampling.acceptance import UNDECIDED, accept
from mlx_t5.sampling.draws import highest, probabilities, row_key, sample
from mlx_t5.settings import Settings

V = 9
SOURCE = [2, 3]
TABLE = random_table(V, seed=3, eos_bias=-3)
TOP_P = {"temp": 1.0, "top_p": 0.9}
FLAT = {"temp": 9.0, "top_p": 0.8}


@pytest.fixture
def few(monkeypatch):
    """Makes the candidates so few that they rarely suffice."""
    monkeypatch.setattr(draws, "CANDIDATES", 2)


def kept(logits, temp=1.0, top_k=0, top_p=1.0):
    """Returns the float64 probabilities of a row; tokens that tie with the last one kept stay."""
    logits = np.float64(logits) / temp
    p = np.exp(logits - logits.max())
    if top_k:
        p[logits < np.sort(logits)[-min(top_k, len(logits))]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        in_front = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        p[p < p[order][in_front < top_p].min()] = 0
    return p / p.sum()


@pytest.mark.parametrize("count", [1, 7, 50, 300])
@pytest.mark.parametrize("size", [300, 401, 4000])
def test_the_candidates_are_the_largest_numbers(size, count):
    x = np.random.default_rng(size).normal(size=(2, 3, size)).astype(np.float32)
    x[0] = x[0].round()  # many tie
    x[1, 0, 5:] = -np.inf
    np.testing.assert_array_equal(highest(mx.array(x), count), np.sort(x, axis=-1)[..., -count:])


# ---- what is kept --------------------------------------------------------------------------------

LOGITS = {
    "one token": [9.0] + [-9.0] * 599,
    "peaked": np.random.default_rng(1).normal(size=600) * 4,
    "flat": np.random.default_rng(2).normal(size=600) / 9,
    "all equal": [0.5] * 600,
    "steps": np.arange(600) // 40 / 9,  # 40 tokens each
    "few allowed": [0.0, 0.0, 1.0] + [-np.inf] * 597,
}


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.5}, {"top_p": 0.93}, {"top_k": 50}, {"top_k": 60, "top_p": 0.8}, {"top_k": 900}],
    ids=str,
)
@pytest.mark.parametrize("logits", LOGITS)
def test_ties_at_every_threshold_stay_and_nothing_else(logits, settings, exhaustive, monkeypatch):
    monkeypatch.setattr(draws, "CANDIDATES", 64)
    row = np.float32(LOGITS[logits])
    sampling = mixed(settings | {"temp": 0.7})
    expected = kept(row, **settings, temp=0.7)
    if exhaustive:
        sampling = sampling.exhaustive()
    p, short = probabilities(mx.array(row)[None, None], sampling)
    if exhaustive or short is None or not short.item():
        np.testing.assert_allclose(p[0, 0], expected, rtol=2e-4, atol=1e-9)
        np.testing.assert_array_equal(np.array(p[0, 0]) > 0, expected > 0)
    else:
        unfiltered = kept(row, temp=0.7)
        assert np.sort(unfiltered)[-64:].sum() < settings["top_p"] and not settings.get("top_k")
        np.testing.assert_allclose(p[0, 0], unfiltered, rtol=2e-4)


@pytest.mark.parametrize("logits", LOGITS)
def test_a_row_keeps_the_same_tokens_whatever_other_rows_use(logits, monkeypatch):
    monkeypatch.setattr(draws, "CANDIDATES", 8)
    rows = [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 500, "top_p": 0.9}, {"temp": 0.0}]
    rows = [{"temp": 1.0} | row for row in rows]
    logits = mx.array(np.float32(LOGITS[logits]))[None, None]
    alone = [probabilities(logits, mixed(row)) for row in rows]
    p, short = probabilities(mx.broadcast_to(logits, (len(rows), 1, 600)), mixed(*rows))
    for i, (own, own_short) in enumerate(alone):
        np.testing.assert_array_equal(p[i], own[0])
        assert short[i].item() == (own_short is not None and own_short.item())


def test_top_k_and_then_top_p_count_ties_as_transformers_does():
    """Four tokens of equal probability survive top-k 2: each has a quarter of the mass."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    logits = np.float32([[2, 2, 2, 2, 1, 0]])
    scores = theirs.TopKLogitsWarper(2)(None, torch.tensor(logits))
    assert (theirs.TopPLogitsWarper(0.7)(None, scores) > -np.inf).sum() == 3  # splits the equals
    p, _ = probabilities(mx.array(logits)[None], mixed({"temp": 1.0, "top_k": 2, "top_p": 0.7}))
    np.testing.assert_allclose(p[0, 0], [0.25] * 4 + [0, 0], rtol=1e-6)


# ---- draws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 128, 300])
def test_a_token_is_drawn_as_often_as_its_weight_says_whatever_its_block(size):
    weights = np.random.default_rng(size).random(size).astype(np.float32) ** 4
    weights[::3] = 0
    rows = 60_000
    tokens = sample(mx.broadcast_to(mx.array(weights), (rows, size)), many_keys(rows))
    check_draws(tokens, weights / weights.sum())
    assert set(np.flatnonzero(weights == 0)).isdisjoint(tokens.tolist())


def test_weights_that_are_no_numbers_draw_a_token_of_the_vocabulary():
    assert 0 <= sample(mx.full((1, 130), mx.nan), keys(1)).item() < 130


# ---- where the candidates fall short -------------------------------------------------------------


def test_accept_reports_rows_whose_candidates_fall_short(few):
    flat, peaked = [0.0] * 5, [9.0, 0.0, 0.0, 0.0, 0.0]
    logits = mx.array([[peaked, flat], [peaked, flat], [flat, peaked], [[mx.nan] * 5, flat]])
    drafts, lengths = mx.zeros((4, 1), mx.int32), mx.array([1, 0, 1, 1])
    sampling = mixed(TOP_P, times=4)
    accepted, _ = accept(logits, drafts, None, lengths, sampling, position_keys(4, 2))
    assert [n == UNDECIDED for n in accepted.tolist()] == [True, False, True, False]
    accepted, _ = accept(logits, drafts, None, lengths, sampling.exhaustive(), position_keys(4, 2))
    assert UNDECIDED not in accepted.tolist()


def texts(settings):
    results = SpeculativeDecoder(FakeModel(TABLE, V)).generate([SOURCE] * 20, 6, **settings)
    return [result.tokens for result in results]


@pytest.mark.parametrize("settings", [TOP_P, FLAT, {"temp": 2.0, "top_k": 4, "top_p": 0.6}])
def test_the_text_is_the_same_however_few_the_candidates(settings, monkeypatch):
    everything = texts(settings)
    monkeypatch.setattr(draws, "CANDIDATES", 2)
    assert texts(settings) == everything


@pytest.mark.parametrize("draft", [False, True])
def test_a_text_does_not_depend_on_flat_rows_beside_it(few, draft):
    model = FakeModel(TABLE, V)

    def decoded(*settings):
        engine = Engine(model, drafter(good(TABLE), model) if draft else None)
        num_draft = 2 if draft else 0
        rows = [
            Row(list(SOURCE), Settings(8, num_draft=num_draft, **own), row_key(7, 0))
            for own in settings
        ]
        engine.insert(rows)
        while engine.rows:
            engine.step()
        return [row.tokens for row in rows]

    kinds = (TOP_P, FLAT, {"temp": 1.0, "top_k": 6}, {"temp": 1.0}, {})
    assert decoded(*kinds) == [decoded(own)[0] for own in kinds]
