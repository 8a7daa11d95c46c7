"""Tests the probabilities that a row samples from, and its independent draws."""

import numpy as np
import pytest

from draws import keys, mixed, position_keys, settings
from mlx_t5.backend import mx
from mlx_t5.sampling import draws as sampling


@pytest.mark.parametrize("min_p", [0.0, 0.2])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.5), (99, 0.01)])
@pytest.mark.parametrize("temp", [0.5, 1.0, 3.0])
def test_probabilities_equal_the_warpers_of_transformers(temp, top_k, top_p, min_p):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    logits = np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32) * 2
    scores = theirs.TemperatureLogitsWarper(temp)(None, torch.tensor(logits))
    if top_k:
        scores = theirs.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = theirs.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = theirs.MinPLogitsWarper(min_p)(None, scores)
    p, _ = sampling.probabilities(
        mx.array(logits)[None], settings(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p)
    )
    np.testing.assert_allclose(p[0], scores.softmax(-1).numpy(), atol=1e-6)


def test_probabilities_use_each_rows_own_settings():
    logits = mx.array(np.random.default_rng(2).normal(size=(4, 2, 10)).astype(np.float32))
    rows = [{}, {"temp": 1.0, "top_k": 2}, {"temp": 0.7, "top_p": 0.5}, {"temp": 2.0}]
    together, _ = sampling.probabilities(logits, mixed(*rows))
    for i, row in enumerate(rows):
        alone, _ = sampling.probabilities(logits[i : i + 1], mixed(row))
        np.testing.assert_allclose(together[i], alone[0], atol=1e-7)


def test_the_draws_of_a_row_do_not_depend_on_other_rows():
    few, many = keys(2), keys(5)
    weights = mx.ones((5, 50))
    assert sampling.sample(weights[:2], few).tolist() == sampling.sample(weights, many).tolist()[:2]
    # A longer block draws the same numbers for the positions it shares.
    short, long = sampling.uniform(position_keys(2, 3)), sampling.uniform(position_keys(5, 7))
    assert short.tolist() == long[:2, :3].tolist()


@pytest.mark.parametrize("p", [1e-3, 2e-8, 1e-10, 1e-14])
def test_a_token_wins_the_race_as_often_as_its_weight_says(p):
    """Integrates over u, from 0 to where the token always loses to tokens of total rate 1 - p."""
    points, end = 2**20, 40 * p * 2**32  # in steps of 2**-32
    steps, digits = np.divmod((np.arange(points) + 0.5) / points * end, 1)
    u = np.stack([steps * 2.0**-32, digits], axis=1).astype(np.float32)
    times = np.array(sampling.waiting_times(mx.array(u)), np.float64)
    assert np.exp(-times * (1 - p) / p).mean() * 40 == pytest.approx(1, rel=1e-3)


def test_no_waiting_time_is_zero_and_zero_weights_never_win():
    assert sampling.waiting_times(mx.zeros((1, 3))).min().item() > 0
    times = sampling.waiting_times(mx.array([[0.0, 0.5, 0.0]]))
    assert mx.argmax(mx.array([[0.0, 1.0]]) / times).item() == 1


def test_tiny_waiting_times_are_as_fine_grained_as_long_ones():
    """With times in steps of 2**-24, a token of probability 2e-8 was drawn a quarter as often."""
    size, rows = 250_112, 60
    tiny_times = []
    for key in np.array(keys(rows)):
        u = mx.random.uniform(shape=(1, size + 1), key=mx.array(key))
        times = np.array(sampling.waiting_times(u), np.float64)
        tiny_times += times[times < 100 * 2.0**-24].tolist()
    expected = size * rows * 100 * 2.0**-24
    assert abs(len(tiny_times) - expected) < 5 * expected**0.5
    quarter = np.bincount((np.array(tiny_times) * 2.0**26).astype(int) % 4, minlength=4)
    chi_squared = ((quarter - len(tiny_times) / 4) ** 2 / (len(tiny_times) / 4)).sum()
    assert chi_squared < 30.7  # 3 degrees of freedom, false alarm 1e-6


def test_neighboring_seeds_and_indices_share_no_stream():
    drawn = {
        tuple(sampling.fold(sampling.row_key(seed, index), position, purpose).tolist())
        for seed in range(4)
        for index in (*range(4), 2**32, 2**32 + 1, 2**33, 10**12)
        for position in range(4)
        for purpose in range(3)
    }
    assert len(drawn) == 4 * 8 * 4 * 3
    assert sampling.row_key(0, 2**70).shape == (2,)
