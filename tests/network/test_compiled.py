"""A compiled pass over one position is the plain one, and little is kept of what was compiled."""

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.network import compiled
from mlx_t5.network.compiled import CompiledStep, compiled_step
from mlx_t5.network.config import T5Config
from mlx_t5.sampling.draws import Sampling
from mlx_t5.settings import Settings
from model import T5, load


@pytest.fixture(scope="module")
def draft():
    return load("demo/draft")[0]


def made(model, rows, source, capacity=64):
    """A cache of so many rows; the sources of all but the first are padded."""
    ids = mx.arange(rows * source).reshape(rows, source) % 90 + 3
    mask = (mx.arange(source) < source - mx.arange(rows)[:, None]) if rows > 1 else None
    return model.cache(model.encode(ids, mask), mask, capacity)


@pytest.mark.parametrize("rows", [1, 3])
def test_several_steps_are_the_plain_ones(draft, rows):
    step, one, other = CompiledStep(draft), made(draft, rows, 8), made(draft, rows, 8)
    offsets = [2 * row for row in range(rows)]
    for token in (0, 7, 9):
        tokens = mx.full((rows, 1), token)
        plain = draft.decode(tokens, one, offsets)
        np.testing.assert_allclose(step(tokens, other, offsets), plain, atol=1e-4)
        offsets = [offset + 1 for offset in offsets]
    for a, b in zip(one.state, other.state, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_it_is_described_once_for_each_shape(draft, monkeypatch):
    step, described = CompiledStep(draft), []
    decode = type(draft).decode
    monkeypatch.setattr(
        type(draft), "decode", lambda *a, **k: described.append(k) or decode(*a, **k)
    )
    caches = [made(draft, 1, source) for source in (8, 8, 12)]
    for cache in caches:
        for position in range(3):
            step(mx.array([[5]]), cache, [position])
    assert described == [{"traced": True}] * 2


def test_what_is_kept_has_a_bound(draft, monkeypatch):
    monkeypatch.setattr(compiled, "MOST_SHAPES", 2)
    step = CompiledStep(draft)
    runs = []
    for source in (4, 5, 4, 6, 4):
        step(mx.array([[5]]), made(draft, 1, source), [0])
        runs.append(step._run)
    assert runs[0] is runs[1] is runs[2] is not runs[3] is runs[4]


def test_without_a_gpu_nothing_is_compiled(draft, monkeypatch):
    monkeypatch.setattr(compiled, "cpu_only", lambda: True)
    assert compiled_step(draft) == draft.decode
    monkeypatch.setattr(compiled, "cpu_only", lambda: False)
    assert isinstance(compiled_step(draft), CompiledStep)


def test_a_draft_takes_the_compiled_step_for_all_but_its_first_pass(draft, monkeypatch):
    drafter = DraftModel(draft, draft)
    drafter.insert([[5, 6, 1]])
    steps, step = [], drafter.step
    monkeypatch.setattr(drafter, "step", lambda *a: steps.append(a) or step(*a))
    drafter.propose([[0]], [{"draft": 4}], Sampling.of([Settings()]), None)
    assert len(steps) == 3


@pytest.mark.parametrize("traced", [False, True])
def test_the_device_begins_before_a_deep_pass_is_described(monkeypatch, traced):
    """Within `mx.compile` nothing can be handed over."""
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
    config = {"model_type": "t5", **shape, "num_layers": 1, "num_decoder_layers": 8}
    model = T5(T5Config.from_dict(config))
    cache = model.cache(model.encode(mx.array([[3, 1]])))
    handed = []
    monkeypatch.setattr(mx, "async_eval", handed.append)
    model.decode(mx.array([[0]]), cache, mx.array([0]), traced=traced)
    assert len(handed) == (0 if traced else 1)
