"""Tests attention: the buckets of transformers, bias and mask in one gather, long sources."""

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.model import T5, load
from mlx_t5.network import bias as position_bias
from mlx_t5.network.bias import RelativeBias, relative_buckets
from mlx_t5.network.sizes import encoder_bytes
from random_models import random_t5

torch = pytest.importorskip("torch")
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402

SMALL = T5Config(
    vocab_size=9, d_model=6, d_kv=2, d_ff=4, num_layers=1, num_heads=3,
    relative_attention_num_buckets=8, relative_attention_max_distance=20,
)  # fmt: skip


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets", [4, 5, 6, 8, 10, 12, 16, 21, 32, 36, 64, 100])
def test_buckets_equal_transformers(num_buckets, bidirectional):
    """All buckets of published models are equal; those of other models, except at boundaries.

    At a boundary the last bit of torch's float32 logarithm decides, which depends on the processor.
    """
    one_side = num_buckets // 2 if bidirectional else num_buckets
    exact = one_side // 2
    for max_distance in {*range(exact + 1, exact + 60), 100, 127, 128, 129, 256, 1000}:
        distances = np.arange(-max_distance - 99, max_distance + 100)  # past the last bucket
        buckets = relative_buckets(distances, bidirectional, num_buckets, max_distance)
        expected = T5Attention._relative_position_bucket(
            torch.tensor(distances), bidirectional, num_buckets, max_distance
        ).numpy()
        ratio = np.maximum(np.abs(distances), exact) / exact
        scaled = np.log(ratio) / np.log(max_distance / exact) * (one_side - exact)
        on_boundary = np.abs(scaled - scaled.round()) < 1e-5
        differ = buckets != expected
        published = (num_buckets, max_distance) == (32, 128)
        assert not np.any(differ if published else differ & ~on_boundary), max_distance
        assert np.all(np.abs(buckets - expected) <= 1), max_distance


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [[[0, 1, 2, 3]], [[37, 38]], [[3, 4], [60, 61], [0, 1]]])
def test_the_bias_of_every_pair_equals_a_loop(queries, causal):
    """The gather over clipped distances equals a loop over pairs, far past the last bucket."""
    num_buckets, max_distance, heads, keys = 8, 20, 3, 64
    bias = RelativeBias(SMALL, causal)
    out = np.array(bias(bias.index(np.array(queries), keys)))
    assert out.shape == (len(queries), heads, len(queries[0]), keys)
    learned = np.array(bias.weight)
    for b, row in enumerate(queries):
        for t, query in enumerate(row):
            distances = np.arange(keys) - query
            expected = learned[relative_buckets(distances, not causal, num_buckets, max_distance)]
            if causal:
                expected[distances > 0] = -np.inf
            np.testing.assert_array_equal(out[b, :, t], expected.T)


def test_other_weights_make_another_table():
    bias = RelativeBias(SMALL, causal=True)
    index = bias.index(np.array([[3, 4]]), 8)
    old = bias(index)
    bias.weight = 2 * bias.weight
    assert mx.array_equal(bias(index), 2 * old)


@pytest.mark.parametrize("family", ["t5", "umt5"])  # shared bias, and one for each layer
def test_chunks_give_transformers_states(reference_of, monkeypatch, family):
    reference = reference_of(family)
    model = load(reference.folder)[0]
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 96, (2, 150))
    mask = np.arange(150) < np.array([[150], [97]])
    at_once = np.array(model.encode(mx.array(ids), mx.array(mask)))
    monkeypatch.setattr(position_bias, "MAX_SCORES", 2 * 4 * 150 * 40)
    in_chunks = np.array(model.encode(mx.array(ids), mx.array(mask)))
    expected = reference.encode(ids.tolist(), mask.astype(int).tolist())
    for states in (at_once, in_chunks):
        np.testing.assert_allclose(states[mask], expected[mask], atol=2e-4)


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_attention_on_cuda_equals_attention_of_mlx(monkeypatch, mode):
    """CUDA's three kernels for additive masks equal MLX's single one, also for beams."""
    model, logits = random_t5(mode), []
    ids = mx.arange(24).reshape(3, 8) + 3
    mask = mx.arange(8) < mx.array([[8], [3], [5]])
    for cuda in (False, True):
        for module in ("model", "mlx_t5.network.cache"):
            monkeypatch.setattr(f"{module}.ON_CUDA", cuda)
        prompts = model.cache(model.encode(ids, mask), mask, 8)
        both = prompts, prompts.shared(2, 8)
        for length in (5, 1):
            for rows in both:
                tokens = mx.full((rows.batch, length), 9)
                logits.append(model.decode(tokens, rows, list(range(rows.batch))))
    for one, other in zip(logits[:4], logits[4:], strict=True):
        differences = np.abs(np.array(one - other))
        assert differences.max() < 1e-4 if mode == "float32" else differences.mean() < 0.05


@pytest.mark.slow
def test_chunks_reduce_the_memory_of_a_long_source(monkeypatch):
    """Small chunks of the scores take less than half of the memory, as estimated."""
    shape = {"vocab_size": 32, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    model = T5(T5Config(**shape, num_heads=16))
    mx.eval(model.parameters())
    ids = mx.zeros((1, 600), mx.int32)
    peaks = []
    for most in (16 * 600 * 600, 16 * 600 * 75):
        monkeypatch.setattr(position_bias, "MAX_SCORES", most)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(model.encode(ids))
        peaks.append(mx.get_peak_memory() - before)
        assert 0.5 * peaks[-1] <= encoder_bytes(model.config, 4, 1, 600)
    assert peaks[1] < peaks[0] / 2
