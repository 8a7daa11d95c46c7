"""Prompts and settings as callers give them, good and bad."""

import numpy as np
import pytest

from backend import UserError
from decoder import SpeculativeDecoder
from fake_model import FakeModel, greedy, random_table

V = 7
TABLE = random_table(V)
SOURCE = [2, 3, 4, 5, 6, 2]


def target():
    return FakeModel(TABLE, V)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temp": -0.1}, "temp is -0.1"),
        ({"temp": float("nan")}, "temp is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 2}, "all 2 samples would be equal; raise temp"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": [1, 2, 3]}, "3 seeds for 1 prompts"),
        ({"prompts": []}, None),
        ({"prompts": [[]]}, "a prompt is empty"),
        ({"prompts": "  "}, "a prompt is empty"),
        ({"prompts": "text"}, "tokenizer"),
        ({"prompts": [V]}, f"token id {V} is outside"),
        ({"prompts": [-1]}, "token id -1 is outside"),
    ],
)
def test_bad_arguments(arguments, complaint):
    arguments = {"prompts": SOURCE, **arguments}
    decoder = SpeculativeDecoder(target())
    if complaint is None:
        assert decoder.generate(**arguments) == []
        return
    with pytest.raises(UserError, match=complaint):
        decoder.generate(**arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_draft": 0}, "num_draft is 0"),
        ({"delta": -0.1}, "delta is -0.1"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"delta": float("nan")}, "delta is nan"),
    ],
)
def test_bad_construction(arguments, complaint):
    with pytest.raises(UserError, match=complaint):
        SpeculativeDecoder(target(), **arguments)


def test_prompts_may_be_numpy_integers():
    model = target()
    result = SpeculativeDecoder(model).generate(list(np.array(SOURCE)), max_tokens=5)
    assert (result.tokens, result.finish_reason) == greedy(model, SOURCE, 5)
