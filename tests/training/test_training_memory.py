"""Estimates of training's memory are upper bounds and close to the real memory."""

from dataclasses import replace

import numpy as np
import pytest

from devices import cpu_allocation
from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.model import T5
from mlx_t5.network.sharing import shared_draft, whole
from mlx_t5.training import training_memory
from mlx_t5.training.batches import collate
from mlx_t5.training.learner import Learner
from mlx_t5.training.loss import token_loss
from mlx_t5.training.teacher_answers import LabeledExample
from random_models import CONFIG

ROWS, SOURCE, ANSWER, WIDTH, V = 16, 64, 32, 128, 2000
SIZES = {"d_model": WIDTH, "d_ff": 512, "num_heads": 4, "d_kv": 32, "vocab_size": V}


def taken(learner, batch, model, steps):
    """Returns the bytes that training steps take, including the trained weights."""
    state = learner.initial_state()
    mx.eval(state.weights, state.moments, batch.arrays, model.parameters())
    mx.clear_cache()
    before = mx.get_active_memory() - sum(weight.nbytes for weight in state.weights.values())
    mx.reset_peak_memory()
    for _ in range(steps):
        state, _ = learner.step(state, [batch])
    return mx.get_peak_memory() - before


@cpu_allocation
@pytest.mark.parametrize("shares, drops", ((True, False), (False, False), (False, True)))
def test_a_step_takes_no_more_memory_than_estimated(shares, drops):
    target = T5(T5Config.from_dict(CONFIG | SIZES | {"num_layers": 2}))
    draft = shared_draft(target, 1) if shares else whole(shared_draft(target, 1))
    top_ids, top_p = np.zeros((ANSWER, 8), np.int32), np.full((ANSWER, 8), 0.1, np.float32)
    one = LabeledExample(np.arange(SOURCE), np.arange(ANSWER), top_ids, top_p)
    states = mx.zeros((ROWS, SOURCE, WIDTH), mx.float16) if shares else None
    batch = replace(collate([one] * ROWS, 0, 0, keep_states=False), states=states)
    drop = draft.drop if drops else None
    learner = Learner(draft, token_loss(draft, 0.0), 10, 0.01, drop=drop)
    size = taken(learner, batch, target, steps=2)
    said = training_memory.estimate(draft, SOURCE, ANSWER, ROWS)
    assert said.rows == ROWS and size <= said.draft + said.step <= 2.5 * size


def test_little_memory_means_small_micro_batches(monkeypatch):
    draft = shared_draft(T5(T5Config.from_dict(CONFIG)), 1)
    step = training_memory.estimate(draft, SOURCE, ANSWER, 16).step
    for limit, rows in ((step / 4 / training_memory.STEP_SHARE, (4, 5)), (1, (1,))):
        monkeypatch.setattr(training_memory, "limit", lambda limit=limit: limit)
        assert training_memory.estimate(draft, SOURCE, ANSWER, 16).rows in rows
