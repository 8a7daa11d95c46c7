"""What ranks send each other: it comes back as it was, and nothing else is believed."""

import json
import math

import numpy as np
import pytest

from mlx_t5.errors import UserError
from mlx_t5.machines.messages import difference, packed_item, unpacked_item
from mlx_t5.machines.outcomes import SCORES, TEXTS, VECTORS, model_fingerprint
from mlx_t5.pairs import Score
from mlx_t5.requests import Result, Stats
from random_models import random_t5


def sent(value):
    return json.loads(json.dumps(value))


def test_outcomes_come_back_as_they_were():
    stats = Stats(prompt_tokens=3, decode_seconds=0.1)
    stats.count(2, 1, "copy")
    texts = [Result("é\n", [1, 2], ["copy", "target"], "stop", stats, score=-0.1)]
    texts.append(Result(None, [], [], "error", Stats(), "too long"))
    assert [TEXTS.unpacked(sent(TEXTS.packed(each))) for each in texts] == texts
    score = Score(-0.1, [-0.1], [1])
    assert SCORES.unpacked(sent(SCORES.packed(score))) == score
    failed = SCORES.unpacked(sent(SCORES.packed(Score(error="empty"))))
    assert math.isnan(failed.logprob) and failed.error == "empty"
    vector = np.random.default_rng(0).normal(size=9).astype(np.float32)
    back = VECTORS.unpacked(sent(VECTORS.packed(vector)))
    assert back.dtype == np.float32 and (back == vector).all()
    assert str(VECTORS.unpacked(sent(VECTORS.packed(UserError("empty"))))) == "empty"


def test_prompts_come_back_as_they_were():
    for item in ("é\u2028", ("a", "b")):
        assert unpacked_item(sent(packed_item(item))) == item
    assert str(unpacked_item(sent(packed_item(UserError("line 2 is empty"))))) == "line 2 is empty"
    for wrong in (None, 1, ["a"], ["a", 1], {}, {"error": 1}):
        with pytest.raises(ValueError):
            unpacked_item(wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"text": 1},
        {"tokens": [1.5]},
        {"tokens": [True]},
        {"writers": "abc"},
        {"finish_reason": None},
        {"stats": {}},
        {"more": 1},
        {"score": "1"},
        {"score": float("nan")},
        {"score": 10**400},
        {"tokens": []},
    ],
)
def test_what_is_no_outcome_is_refused(change):
    good = TEXTS.packed(Result("a", [1], ["draft"], "stop", Stats()))
    with pytest.raises(ValueError):
        TEXTS.unpacked(sent({**good, **change}))
    for value in (None, [], {}, [1, "2"]):
        for codec in (TEXTS, SCORES):
            with pytest.raises(ValueError):
                codec.unpacked(value)
    for number in ("2", math.nan, -math.inf, 1e300, 10**400):
        with pytest.raises(ValueError):
            VECTORS.unpacked([1, number])
        with pytest.raises(ValueError):
            SCORES.unpacked({**SCORES.packed(Score(-1.0, [-1.0], [1])), "logprob": number})


def test_ranks_know_whether_they_have_the_same_job():
    ours = {"target model": model_fingerprint(random_t5()), "set of options": "x"}
    assert difference(ours, {**ours, "more": 1}) is None
    assert model_fingerprint(random_t5()) == ours["target model"]
    other = {**ours, "target model": model_fingerprint(random_t5(noise=1e-3))}
    assert difference(ours, other) == "target model"
    assert difference(ours, None) == "job" and difference(ours, {}) == "target model"
