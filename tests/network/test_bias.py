"""Relative position bias: buckets as in transformers, and the causal mask in the same gather."""

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.network.bias import RelativeBias, relative_buckets

torch = pytest.importorskip("torch")
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402


def test_buckets_by_hand():
    distances = np.array([-9, -8, -4, -3, -1, 0, 1, 3, 4, 8, 9])
    causal = relative_buckets(distances, False, 8, 16)
    assert causal.tolist() == [6, 6, 4, 3, 1, 0, 0, 0, 0, 0, 0]
    both = relative_buckets(distances, True, 8, 16)
    assert both.tolist() == [3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]


def both_buckets(num_buckets, max_distance, bidirectional):
    """Distances beyond the last bucket on both sides, and their buckets by us and transformers."""
    distances = np.arange(-max_distance - 99, max_distance + 100)
    ours = relative_buckets(distances, bidirectional, num_buckets, max_distance)
    theirs = T5Attention._relative_position_bucket(
        torch.tensor(distances), bidirectional, num_buckets, max_distance
    )
    return distances, ours, theirs.numpy()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_published_models_equal_transformers(bidirectional):
    _, ours, theirs = both_buckets(32, 128, bidirectional)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets", [4, 5, 6, 8, 10, 12, 16, 21, 32, 36, 64, 100])
def test_buckets_equal_transformers(num_buckets, bidirectional):
    """Also on boundaries, but for those that the last bit of torch's float32 logarithm decides.

    That bit depends on the processor torch runs on.
    """
    one_side = num_buckets // 2 if bidirectional else num_buckets
    exact = one_side // 2
    for max_distance in [*range(exact + 1, exact + 60), 100, 127, 128, 129, 200, 256, 512, 1000]:
        if max_distance <= exact:
            continue
        distances, ours, theirs = both_buckets(num_buckets, max_distance, bidirectional)
        ratio = np.maximum(np.abs(distances), exact) / exact
        scaled = np.log(ratio) / np.log(max_distance / exact) * (one_side - exact)
        on_boundary = np.abs(scaled - scaled.round()) < 1e-5
        differ = ours != theirs
        assert not np.any(differ & ~on_boundary), max_distance
        assert np.all(np.abs(ours - theirs) <= 1), max_distance


def test_boundaries_are_rounded_to_float32():
    """log(2) / log(32) * 5 is 1, and just below in float64: there 10 would fall into bucket 5."""
    assert relative_buckets(-np.array([9, 10, 20, 80]), False, 10, 160).tolist() == [5, 6, 7, 9]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [[[0, 1, 2, 3]], [[37, 38]], [[3, 4], [60, 61], [0, 1]]])
def test_bias_of_every_pair(queries, causal):
    """The gather over clipped distances equals a loop over pairs, far past the last bucket."""
    num_buckets, max_distance, heads, keys = 8, 20, 3, 64
    bias = RelativeBias(num_buckets, max_distance, causal)
    weight = mx.random.normal((num_buckets, heads), key=mx.random.key(0))
    index = bias.index(mx.array(queries), keys)
    (table,) = bias.by_distance([weight])
    out = np.array(bias(table, index))
    assert out.shape == (len(queries), heads, len(queries[0]), keys)
    learned = np.array(weight)
    for b, row in enumerate(queries):
        for t, query in enumerate(row):
            distances = np.arange(keys) - query
            expected = learned[relative_buckets(distances, not causal, num_buckets, max_distance)]
            if causal:
                expected[distances > 0] = -np.inf
            np.testing.assert_array_equal(out[b, :, t], expected.T)


def test_bias_by_distance_is_made_once_for_the_same_weights():
    bias = RelativeBias(8, 20, causal=True)
    old, new = (mx.random.normal((8, 3), key=mx.random.key(seed)) for seed in range(2))
    (first,), (again,), (other,) = (bias.by_distance([w]) for w in (old, old, new))
    assert again is first
    np.testing.assert_array_equal(np.array(other[:, :-1]), np.array(new[bias.table[:-1]].T))
