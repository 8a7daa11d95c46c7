"""Tests the model against transformers for every family, and the cache against full passes.

Tolerances are relative to the standard deviation of the compared values: 2e-4 to transformers in
float32, 1e-4 between two computations of this project's decoder.
"""

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

import families
from families import SHAPE
from mlx_t5.backend import cpu_only, mx, tree_flatten
from mlx_t5.checkpoints import config
from mlx_t5.checkpoints.checkpoint import fill
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.model import ACTIVATIONS, T5, load

S, T = 23, 19


def assert_close(values, expected, tolerance):
    values, expected = np.array(values), np.array(expected)
    assert values.shape == expected.shape
    assert np.isfinite(values).all()
    assert np.abs(values - expected).max() <= tolerance * expected.std()


def batch(family, source=(S, 11, 1), target=T, seed=0):
    """Returns random padded sources of these lengths, their mask, and random targets."""
    rng = np.random.default_rng(seed)
    mask = np.arange(max(source)) < np.array(source)[:, None]
    ids = np.where(mask, rng.integers(3, 96, mask.shape), family.raw["pad_token_id"])
    decoder_ids = rng.integers(3, 96, (len(source), target))
    decoder_ids[:, 0] = family.raw["decoder_start_token_id"]
    return ids, mask.astype(int), decoder_ids


@pytest.fixture
def model(reference):
    return load(reference.folder)[0]


@pytest.fixture
def small(reference_of):
    """Returns a model for tests of any family: uneven depth and unusual buckets."""
    return load(reference_of("buckets").folder)[0]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name):
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0]]).astype(np.float32)
    expected = ACT2FN[name](torch.tensor(x)).numpy()
    tolerance = 1e-6 if cpu_only() else 1e-5  # a GPU has different exp and erf
    values = np.array(ACTIVATIONS[name](mx.array(x)))
    np.testing.assert_allclose(values, expected, tolerance, tolerance)


def test_the_configuration_accepts_what_the_model_has():
    assert tuple(ACTIVATIONS) == config.ACTIVATION_NAMES


def test_a_feed_forward_gated_by_its_flag_alone(reference_of):
    """transformers reads a config.json without `feed_forward_proj` like this."""
    entries = {"is_gated_act": True, "dense_act_fn": "quick_gelu"}
    reference = reference_of(families.Family("flag", entries))
    model = load(reference.folder)[0]
    ids, mask, decoder_ids = batch(reference.family)
    logits = model(mx.array(ids), mx.array(decoder_ids), mx.array(mask))
    assert_close(logits, reference.logits(ids.tolist(), decoder_ids.tolist(), mask.tolist()), 2e-4)


def test_logits_equal_transformers(reference, model):
    ids, mask, decoder_ids = batch(reference.family)
    logits = model(mx.array(ids), mx.array(decoder_ids), mx.array(mask))
    assert logits.dtype == mx.float32
    assert_close(logits, reference.logits(ids.tolist(), decoder_ids.tolist(), mask.tolist()), 2e-4)


@pytest.mark.parametrize("name", ["t5", "umt5", "buckets"])
def test_logits_equal_transformers_past_the_last_bucket(reference_of, name):
    reference = reference_of(name)
    ids, _, decoder_ids = batch(reference.family, (300,), target=200)
    logits = load(reference.folder)[0](mx.array(ids), mx.array(decoder_ids))
    assert_close(logits, reference.logits(ids.tolist(), decoder_ids.tolist(), None), 2e-4)


@pytest.mark.parametrize("blocks", [[1] * T, [1, 4, 2, 7, 5]])
def test_incremental_decoding_equals_one_pass(reference, model, blocks):
    ids, mask, decoder_ids = map(mx.array, batch(reference.family))
    cache = model.cache(model.encode(ids, mask), mask, capacity=T)
    pieces, start = [], 0
    for length in blocks:
        tokens = decoder_ids[:, start : start + length]
        pieces.append(model.decode(tokens, cache, [start] * 3))
        start += length
    assert_close(mx.concatenate(pieces, axis=1), model(ids, decoder_ids, mask), 1e-4)


@pytest.mark.parametrize("offsets", [[3, 9, 0], [3, 3, 3]])
def test_rows_roll_back_and_continue_independently(reference, model, offsets):
    """One pass feeds 4, 1 and 2 tokens over wrong tokens; the rest is padding."""
    ids, mask, decoder_ids = map(mx.array, batch(reference.family))
    full = model(ids, decoder_ids, mask)
    cache = model.cache(model.encode(ids, mask), mask, capacity=T + 4)
    lengths = [4, 1, 2]
    model.decode(decoder_ids, cache, [0] * 3)
    model.decode(mx.full((3, T - 9), 7), cache, offsets)
    for _ in range(2):
        rows = [decoder_ids[b, o : o + n].tolist() + [7] * (4 - n)
                for b, (o, n) in enumerate(zip(offsets, lengths, strict=True))]  # fmt: skip
        logits = model.decode(mx.array(rows), cache, offsets)
        for b, (o, n) in enumerate(zip(offsets, lengths, strict=True)):
            assert_close(logits[b, :n], full[b, o : o + n], 1e-4)
        offsets = [o + n for o, n in zip(offsets, lengths, strict=True)]


def test_a_row_does_not_depend_on_padding_or_neighbors(small, reference_of):
    ids, mask, decoder_ids = map(mx.array, batch(reference_of("buckets").family))
    together = small(ids, decoder_ids, mask)
    for b, length in enumerate([S, 11, 1]):
        alone = small(ids[b : b + 1, :length], decoder_ids[b : b + 1])
        assert_close(together[b : b + 1], alone, 1e-4)
        padded = mx.pad(ids[b : b + 1, :length], ((0, 0), (9, 30)), constant_values=50)
        mask_ = mx.pad(mx.ones((1, length), mx.bool_), ((0, 0), (9, 30)))
        assert_close(small(padded, decoder_ids[b : b + 1], mask_), alone, 1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_row_of_padding_only_is_not_nan(small, dtype):
    small.set_dtype(dtype)
    logits = small(mx.zeros((2, 5), mx.int32), mx.zeros((2, 3), mx.int32), mx.zeros((2, 5)))
    assert np.isfinite(np.array(logits)).all()


def test_cross_attention_is_computed_once(small, reference_of):
    ids, mask, decoder_ids = map(mx.array, batch(reference_of("buckets").family))
    expected = small(ids, decoder_ids, mask)
    cache = small.cache(small.encode(ids, mask), mask, capacity=T)
    for layer in small.decoder.layers:
        layer.cross_attention.k = layer.cross_attention.v = None
    assert_close(small.decode(decoder_ids, cache, [0] * 3), expected, 1e-6)


def large_model(out=1.0, hidden=1.0):
    """Returns a FLAN-like model; `out`, `hidden` scale feed-forward outputs and gated products."""
    config = T5Config.from_dict({"model_type": "t5", **SHAPE, **families.UNTIED})
    mx.random.seed(3)
    model = T5(config, separate_head=True)
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        layer.feed_forward.wo.weight *= out
        layer.feed_forward.wi_0.weight *= hidden
        layer.feed_forward.wi_1.weight *= hidden
    return model


@pytest.mark.parametrize("sizes", [{}, {"out": 1e6}, {"hidden": 2e3}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 0.2), (mx.float16, 0.05)])
def test_half_precision_stays_close_to_float32(dtype, tolerance, sizes):
    """This includes hidden units and residuals beyond the range of float16, as in FLAN."""
    ids, decoder_ids = mx.arange(3, 20)[None], mx.arange(2, 12)[None]
    model = large_model(**sizes)
    half = T5(model.config, separate_head=True)
    fill(half, iter(tree_flatten(model.parameters())), dtype)
    cache = half.cache(half.encode(ids), None, 10)
    logits = half.decode(decoder_ids, cache, [0])
    assert {array.dtype for array in cache.state} == {dtype}
    assert logits.dtype == mx.float32
    assert_close(logits, model(ids, decoder_ids), tolerance)
