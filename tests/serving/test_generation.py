"""Tests log-probabilities against softmax by hand and against the target token by token."""

import math

import numpy as np
import pytest

from fake_model import FakeModel, drafter, good, random_table
from mlx_t5.backend import mx
from mlx_t5.decoder import Engine
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.draws import row_key
from mlx_t5.serving.generation import LogprobRecorder, likeliest_logprobs
from mlx_t5.settings import Settings

V = 9
TABLE = random_table(V, eos_bias=-0.5)
ALTERNATIVES = {0: 0, 2: 3}  # by a row's first token; row 1 requests none


def test_likeliest_logprobs_equal_the_log_softmax():
    p = np.array([0.1, 0.6, 0.3], np.float32)
    values, top, ids = likeliest_logprobs(mx.array(np.log(p)[None, None] + 5), mx.array([[2]]), 2)
    assert ids.tolist() == [[[1, 2]]]
    assert values.item() == pytest.approx(math.log(0.3), abs=1e-6)
    assert top.tolist()[0][0] == pytest.approx([math.log(0.6), math.log(0.3)], abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"temp": 0.8, "top_p": 0.7}, {"delta": 0.5}])
def test_logprobs_are_the_targets_for_tokens_of_any_origin(settings):
    model = FakeModel(TABLE, V)
    engine = Engine(model, drafter(good(TABLE), model))
    engine.on_verified = recorder = LogprobRecorder(lambda row: ALTERNATIVES.get(row.ids[0]))
    lengths = [9, 14, 12]
    rows = [
        Row([i] * (1 + i), Settings(max_tokens=n, num_draft=i + 1, **settings), row_key(i, 0))
        for i, n in enumerate(lengths)
    ]
    engine.insert(rows)
    records = {0: [], 2: []}
    while engine.rows:
        engine.step()
        for row, entries in recorder.collect():
            records[next(i for i in records if rows[i] is row)] += entries
    for i, entries in records.items():
        row = rows[i]
        assert [entry.token for entry in entries] == row.tokens[1:]
        for t, entry in enumerate(entries):
            logits = model.table(tuple(row.ids), tuple(row.tokens[: t + 1])).astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum())
            assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-5)
            best = np.argsort(-expected)[: ALTERNATIVES[i]]
            assert [token for token, _ in entry.top] == best.tolist()
            assert [value for _, value in entry.top] == pytest.approx(expected[best], abs=1e-5)
