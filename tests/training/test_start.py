"""Tests which tokens a draft may propose, and which layers are trained."""

from dataclasses import replace

import numpy as np
import pytest

from mlx_t5.backend import tree_flatten
from mlx_t5.checkpoints.adapters import LoraConfig
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.training import start
from mlx_t5.training.fine_tuning import adapt, unfreeze_last

ANSWERS = [(7, 7, 7, 5, 1), np.array([5, 9, 5, 9, 7, 1]), (3, 99)]


@pytest.mark.parametrize(
    "held_out, size, expected",
    [
        ([(7, 3)], 3, [1, 2, 7]),  # the end tokens, then the most frequent one
        ([(1, 7) * 198 + (9,)], None, [1, 2, 5, 7]),  # 99.7 % without 9
        ([(1, 7) * 9, (9,)], None, [1, 2, 3, 5, 7, 9]),
        ([(0,)], None, [0, 1, 2, 3, 4, 5, 7, 9]),  # of equally frequent ids the lowest
        ([(50,)], None, list(range(12))),
        ([], None, [1, 2]),
    ],
)
def test_a_draft_proposes_the_most_frequent_tokens(monkeypatch, held_out, size, expected):
    monkeypatch.setattr(start, "STEP", 2)
    log = []
    ids = start.frequent_tokens(ANSWERS, held_out, [2, 1, 50], 12, size, log.append)
    assert ids.tolist() == expected
    assert f"{len(expected)} of 12 tokens" in log[0] and (not size or "50.0% of what" in log[0])


LORA = LoraConfig(r=3, target_modules="all-linear")


def test_the_last_layers_alone_are_trained(reference_of):
    model, _ = load(reference_of("byt5").folder, "float32")
    unfreeze_last(model, 1)
    names = {".".join(n.split(".")[:3]) for n, _ in tree_flatten(model.trainable_parameters())}
    assert names == {"encoder.layers.5", "decoder.layers.1"}


@pytest.mark.parametrize(
    "entries, num_layers, message",
    [
        ({"target_modules": ("q", "block.0.layer.0.SelfAttention.v")}, 1, "SelfAttention.v: this"),
        ({"r": 33}, -1, "--r 33 is too large; encoder.block.0.* allows at most 32"),
    ],
)
def test_bad_layers_and_ranks_are_refused(reference_of, entries, num_layers, message):
    model, _ = load(reference_of("flan").folder, "float32")
    with pytest.raises(UserError, match=message):
        adapt(model, replace(LORA, **entries), num_layers)
