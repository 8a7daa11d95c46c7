"""What a row samples from, and that its draws are its own."""

import numpy as np
import pytest

import sampling
from backend import mx
from draws import keys, settings
from sampling import Sampling


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.5), (99, 0.01)])
@pytest.mark.parametrize("temp", [0.5, 1.0, 3.0])
def test_probabilities_equal_the_warpers_of_transformers(temp, top_k, top_p):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    logits = np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32) * 2
    scores = theirs.TemperatureLogitsWarper(temp)(None, torch.tensor(logits))
    if top_k:
        scores = theirs.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = theirs.TopPLogitsWarper(top_p)(None, scores)
    p = sampling.probabilities(mx.array(logits)[None], settings(1, temp, top_k, top_p))
    np.testing.assert_allclose(p[0], scores.softmax(-1).numpy(), atol=1e-6)


def test_probabilities_take_each_rows_own_settings():
    logits = mx.array(np.random.default_rng(2).normal(size=(4, 2, 10)).astype(np.float32))
    rows = [(0.0, 0, 1.0), (1.0, 2, 1.0), (0.7, 0, 0.5), (2.0, 0, 1.0)]
    together = sampling.probabilities(logits, Sampling.of(*zip(*rows, strict=True), [0.0] * 4))
    for i, row in enumerate(rows):
        alone = sampling.probabilities(logits[i : i + 1], settings(1, *row))
        np.testing.assert_allclose(together[i], alone[0], atol=1e-7)


def test_draws_belong_to_the_row_alone():
    few, many = keys(2), keys(5)
    weights = mx.ones((5, 50))
    assert sampling.sample(weights[:2], few).tolist() == sampling.sample(weights, many).tolist()[:2]
    # A longer block draws the same numbers for the positions it shares.
    short, long = sampling.uniform(few, 3), sampling.uniform(many, 7)
    assert short.tolist() == long[:2, :3].tolist()


def test_however_many_samples_there_are_each_prompt_has_its_own_streams():
    indices = [0, 1, 2**32, 2**32 + 1, 2**33, 10**12, 2**70]
    drawn = {tuple(sampling.row_key(0, index).tolist()) for index in indices[:-1]}
    assert len(drawn) == len(indices) - 1
    assert sampling.row_key(0, indices[-1]).shape == (2,)


def test_neighbouring_seeds_and_indices_share_no_stream():
    drawn = {
        tuple(sampling.fold(sampling.row_key(seed, index), position, purpose).tolist())
        for seed in range(4)
        for index in range(4)
        for position in range(4)
        for purpose in range(3)
    }
    assert len(drawn) == 4 * 4 * 4 * 3
