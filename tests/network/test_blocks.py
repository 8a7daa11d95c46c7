"""Long sources: the same states by the block, in less memory."""

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.network import blocks
from mlx_t5.network.config import T5Config
from mlx_t5.network.memory import encoder_bytes
from model import T5, load


def test_short_sources_are_whole_and_long_ones_are_not():
    assert blocks.block_queries(1, 64, 512) == 512
    assert blocks.block_queries(2, 64, 512) == 512
    assert blocks.block_queries(1, 64, 4096) == 128
    assert blocks.block_queries(1, 128, 100_000) == blocks.LEAST_QUERIES


@pytest.mark.parametrize("family", ["t5", "umt5"])  # one bias for all layers, and one a layer
def test_blocks_give_transformers_states(made, monkeypatch, family):
    reference = made(family)
    model = load(reference.folder)[0]
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 96, (2, 150))
    mask = np.arange(150) < np.array([[150], [97]])
    whole = np.array(model.encode(mx.array(ids), mx.array(mask)))
    monkeypatch.setattr(blocks, "MAX_SCORES", 2 * 4 * 150 * 40)
    queries = []
    fused = mx.fast.scaled_dot_product_attention

    def watched(q, *rest, **options):
        queries.append(q.shape[2])
        return fused(q, *rest, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    parts = np.array(model.encode(mx.array(ids), mx.array(mask)))
    assert queries == [40, 40, 40, 30] * 3
    theirs = reference.encode(ids.tolist(), mask.astype(int).tolist())
    for states in (whole, parts):
        np.testing.assert_allclose(states[mask], theirs[mask], atol=2e-4)


@pytest.mark.slow
def test_memory_of_a_long_source(monkeypatch):
    """A quarter of the scores at once takes less than half of the memory, as is reckoned."""
    shape = {"vocab_size": 32, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    model = T5(T5Config(**shape, num_heads=16))
    mx.eval(model.parameters())
    ids = mx.zeros((1, 1000), mx.int32)
    taken = []
    for most in (16 * 1000 * 1000, 16 * 1000 * 125):
        monkeypatch.setattr(blocks, "MAX_SCORES", most)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(model.encode(ids))
        taken.append(mx.get_peak_memory() - before)
        assert 0.5 * taken[-1] <= encoder_bytes(model.config, 4, 1, 1000)
    assert taken[1] < taken[0] / 2
