"""Tests a training step: its gradient, its micro-batches, and the trained weights."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.network.sharing import shared_draft, whole
from mlx_t5.training.batches import collate
from mlx_t5.training.learner import Learner, State
from mlx_t5.training.loss import token_loss
from mlx_t5.training.teacher_answers import label
from random_models import random_t5

PAIRS = [((5, 9, 1), (7, 8, 1)), ((6, 1), (3, 1)), ((4, 4, 9, 20, 1), (30, 2, 2, 50, 1))]


def learner_of(draft, iters=10, learning_rate=0.01, compiled=None):
    return Learner(draft, token_loss(draft, 0.0), iters, learning_rate, compiled)


def batch_of(target, chosen=slice(None), states=True):
    """Returns labeled examples as a batch, with or without the encoder's output."""
    batch = collate(label(target, PAIRS)[chosen], 0, 0, keep_states=False)
    if not states:
        return batch
    return replace(batch, states=target.encode(batch.source, batch.mask))


@pytest.fixture
def target():
    return random_t5()


@pytest.mark.parametrize("shares", (True, False))
def test_gradients_are_finite_differences(target, shares):
    """Each tensor is moved along its gradient by small steps, as attention is very nonlinear."""
    draft = shared_draft(target, 1) if shares else whole(shared_draft(target, 1))
    learner, arrays = learner_of(draft), batch_of(target, states=shares).arrays
    weights = learner.initial_state().weights
    loss, slopes = learner._gradient(weights, arrays)
    assert loss.item() > 1 and slopes.keys() == weights.keys()
    assert any(name.startswith("encoder") for name in weights) != shares
    for name, slope in slopes.items():
        length = mx.linalg.norm(slope)
        moved = [weights[name] + step * slope / length for step in (1e-3, -1e-3)]
        ahead, behind = (learner._gradient(weights | {name: w}, arrays)[0].item() for w in moved)
        assert (ahead - behind) / 2e-3 == pytest.approx(length.item(), rel=2e-2, abs=2e-3), name


def test_micro_batches_equal_one_batch(target):
    learner = learner_of(shared_draft(target, 1))
    start = learner.initial_state()
    one, loss = learner.step(start, [batch_of(target)])
    other, same = learner.step(start, [batch_of(target, slice(2)), batch_of(target, slice(2, 3))])
    assert loss == pytest.approx(same, rel=1e-5) and one.step == other.step == 1
    for name, weight in one.weights.items():
        np.testing.assert_allclose(np.array(weight), np.array(other.weights[name]), atol=1e-4)
        assert not mx.array_equal(weight, start.weights[name]), name
    assert mx.array_equal(target.encoder.norm.weight, random_t5().encoder.norm.weight)


def test_states_are_encoded_where_they_are_not_kept_and_the_targets_decoder_learns_nothing(target):
    for layers, expected in ((1, None), (2, 0)):
        learner = learner_of(shared_draft(target, layers))
        loss, encoded_loss = (
            learner.step(learner.initial_state(), [batch_of(target, states=states)])[1]
            for states in (True, False)
        )
        assert loss == pytest.approx(encoded_loss, rel=1e-5, abs=1e-5)
        assert expected is None or loss == pytest.approx(expected, abs=1e-5)


def test_a_step_with_an_infinite_loss_returns_no_state(target):
    learner = learner_of(shared_draft(target, 1))
    state = learner.initial_state()
    name = "decoder.layers.0.feed_forward.wo.weight"
    broken = State(state.weights | {name: state.weights[name] * math.inf}, state.moments)
    assert learner.step(broken, [batch_of(target)])[0] is None


def test_a_quantized_target_is_learned_from_in_float32():
    target = random_t5("4 bit")
    learner = learner_of(shared_draft(target, 1))
    state, loss = learner.step(learner.initial_state(), [batch_of(target)])
    assert math.isfinite(loss) and {a.dtype for a in state.weights.values()} == {mx.float32}
