"""Estimates of training's memory are what it takes at most, and not much more."""

from dataclasses import replace

import numpy as np
import pytest

from devices import cpu_allocation
from mlx_t5.backend import mx
from mlx_t5.network.config import T5Config
from mlx_t5.network.sharing import shared_draft, whole
from mlx_t5.training import memory
from mlx_t5.training.answers import LabelledExample
from mlx_t5.training.batches import collate
from mlx_t5.training.learner import Learner
from mlx_t5.training.loss import token_loss
from model import T5
from random_models import CONFIG

ROWS, SOURCE, ANSWER, WIDTH, V = 16, 64, 32, 128, 2000


@cpu_allocation
@pytest.mark.parametrize("shares", (True, False))
def test_a_step_takes_no_more_than_was_said(shares):
    sizes = {"d_model": WIDTH, "d_ff": 512, "num_heads": 4, "d_kv": 32, "vocab_size": V}
    target = T5(T5Config.from_dict(CONFIG | sizes | {"num_layers": 2}))
    draft = shared_draft(target, 1) if shares else whole(shared_draft(target, 1))
    top_p = np.full((ANSWER, 8), 0.1, np.float32)
    one = LabelledExample(
        np.arange(SOURCE), np.arange(ANSWER), np.zeros((ANSWER, 8), np.int32), top_p
    )
    batch = collate([one] * ROWS, 0, 0, keep_states=False)
    states = mx.zeros((ROWS, SOURCE, WIDTH), mx.float16) if shares else None
    batch = replace(batch, states=states)
    learner = Learner(draft, token_loss(draft, 0.0), 10, 0.01)
    state = learner.begin()
    mx.eval(state.weights, state.moments, batch.arrays, target.parameters())
    mx.clear_cache()
    before = mx.get_active_memory() - sum(weight.nbytes for weight in state.weights.values())
    mx.reset_peak_memory()
    for _ in range(2):
        state, _ = learner.step(state, [batch])
    taken = mx.get_peak_memory() - before
    said = memory.estimate(draft, SOURCE, ANSWER, ROWS)
    assert said.rows == ROWS and taken <= said.draft + said.step <= 2.5 * taken


def test_little_memory_makes_small_parts(monkeypatch):
    target = T5(T5Config.from_dict(CONFIG))
    draft = shared_draft(target, 1)
    need = memory.row_bytes(draft.config, SOURCE, ANSWER, with_encoder=False)
    monkeypatch.setattr(memory, "limit", lambda: 3.5 * need / memory.STEP_SHARE)
    assert memory.estimate(draft, SOURCE, ANSWER, 16).rows == 3
    monkeypatch.setattr(memory, "limit", lambda: 1)
    assert memory.estimate(draft, SOURCE, ANSWER, 16).rows == 1
