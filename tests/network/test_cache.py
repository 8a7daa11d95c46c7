"""Tests the decoder's cache: rows join, leave and grow without changing each other."""

import math

import numpy as np
import pytest

from devices import cpu_allocation
from families import SHAPE
from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.model import T5
from mlx_t5.network import compiled
from mlx_t5.network.cache import SLOT_MULTIPLE, round_up, source_width

T = 12


@pytest.fixture(scope="module")
def model():
    mx.random.seed(1)
    model = T5(T5Config.from_dict({"model_type": "t5", **SHAPE}))
    for stack in (model.encoder, model.decoder):
        stack.relative_attention_bias[0].weight *= 20
    return model


@pytest.fixture(scope="module")
def rows(model):
    """Returns five prompts, their targets, and the logits of each prompt decoded alone."""
    rng = np.random.default_rng(0)
    prompts = [mx.array(rng.integers(3, 96, (1, n))) for n in (5, 17, 1, 9, 17)]
    targets = mx.array(rng.integers(3, 96, (5, T)))
    logits = [model(ids, targets[i : i + 1]) for i, ids in enumerate(prompts)]
    return prompts, targets, mx.concatenate(logits)


def cache_of(model, prompts, capacity=T):
    """Returns one cache for prompts padded to the longest prompt."""
    width = max(ids.shape[1] for ids in prompts)
    pads = [width - ids.shape[1] for ids in prompts]
    ids = mx.concatenate([mx.pad(a, ((0, 0), (0, p))) for a, p in zip(prompts, pads, strict=True)])
    mask = None
    if any(pads):
        mask = mx.arange(width) < mx.array([[a.shape[1]] for a in prompts])
    return model.cache(model.encode(ids, mask), mask, capacity)


def feed(model, cache, targets, offsets, length):
    """Feeds `length` tokens of each row from its offset on; returns their logits."""
    tokens = [targets[i, o : o + length] for i, o in enumerate(offsets)]
    return model.decode(mx.stack(tokens), cache, offsets)


def assert_rows(logits, expected):
    np.testing.assert_allclose(np.array(logits), np.array(expected), atol=1e-4)


def expect(logits, rows, offsets, length):
    return mx.stack([logits[r, o : o + length] for r, o in zip(rows, offsets, strict=True)])


@pytest.mark.parametrize("indices", [[0, 1, 2, 3, 4], [3], [4, 0], [2, 2, 1], [4, 3, 2, 1, 0]])
def test_filter_selects_rows(model, rows, indices):
    prompts, targets, logits = rows
    cache = cache_of(model, prompts)
    feed(model, cache, targets, [0] * 5, 6)
    cache.filter(indices)
    assert cache.batch == len(indices)
    offsets = [6 - i for i in range(len(indices))]
    out = feed(model, cache, targets[mx.array(indices)], offsets, 3)
    assert_rows(out, expect(logits, indices, offsets, 3))


@pytest.mark.parametrize("progress", [6, SLOT_MULTIPLE - 3])
def test_trim_frees_slots_that_no_row_needs(model, rows, progress):
    prompts, _, _ = rows
    order = sorted(range(5), key=lambda i: len(prompts[i][0]))
    short, long = prompts[order[0]], mx.tile(prompts[order[-1]], (1, 9))
    length = progress + 4
    targets = mx.array(np.random.default_rng(3).integers(3, 96, (2, length)))
    cache = cache_of(model, [short, long], 4 * SLOT_MULTIPLE)
    feed(model, cache, targets, [0, 0], progress)
    cache.filter([0])
    wide = cache.source
    cache.trim(wide // 2 + 1, 3 * SLOT_MULTIPLE)
    assert (cache.source, cache.capacity) == (wide, 4 * SLOT_MULTIPLE), "not for less than half"
    cache.trim(short.shape[1], progress)
    assert (cache.source, cache.capacity) == (source_width(short.shape[1]), SLOT_MULTIPLE)
    cache.reserve(length)
    out = feed(model, cache, targets[:1], [progress], 4)
    assert_rows(out, model(short, targets[:1])[:, progress:])


@pytest.mark.parametrize("split", [([0], [1]), ([0, 1], [2, 3]), ([1], [4]), ([2], [4, 1])])
@pytest.mark.parametrize("capacities", [(T, 3 * SLOT_MULTIPLE), (3 * SLOT_MULTIPLE, T)])
def test_append_joins_rows(model, rows, split, capacities):
    """Rows with and without padding join, in caches of different capacities and progress."""
    prompts, targets, logits = rows
    first, second = (
        cache_of(model, [prompts[i] for i in part], capacity)
        for part, capacity in zip(split, capacities, strict=True)
    )
    order = [*split[0], *split[1]]
    feed(model, first, targets[mx.array(split[0])], [0] * len(split[0]), 7)
    feed(model, second, targets[mx.array(split[1])], [0] * len(split[1]), 2)
    first.extend(second)
    assert (first.batch, first.capacity) == (len(order), max(map(round_up, capacities)))
    assert (first.mask is None) == (order == [1, 4]), "none is needed for equal lengths"
    offsets = [7] * len(split[0]) + [2] * len(split[1])
    out = feed(model, first, targets[mx.array(order)], offsets, 4)
    assert_rows(out, expect(logits, order, offsets, 4))


def test_reserve_keeps_the_tokens_fed_before(model, rows):
    prompts, targets, logits = rows
    cache = cache_of(model, prompts)
    feed(model, cache, targets, [0] * 5, 6)
    cache.reserve(SLOT_MULTIPLE + 1)
    assert cache.capacity == 2 * SLOT_MULTIPLE
    cache.reserve(3)
    assert cache.capacity == 2 * SLOT_MULTIPLE
    assert_rows(feed(model, cache, targets, [6] * 5, 3), logits[:, 6:9])


def test_attention_sees_all_earlier_slots_across_multiples(model, rows):
    """A position just past a multiple also sees all slots before it."""
    prompts, _, _ = rows
    length = 2 * SLOT_MULTIPLE + 3
    targets = mx.array(np.random.default_rng(5).integers(3, 96, (1, length)))
    expected = model(prompts[0], targets)
    cache = cache_of(model, prompts[:1])  # slots are added as needed
    out = [model.decode(targets[:, i : i + 1], cache, [i]) for i in range(length)]
    assert_rows(mx.concatenate(out, axis=1), expected)


def test_slots_after_a_rows_position_change_nothing(model, rows):
    """The contents of slots after a row's position do not even change the rounding."""
    prompts, targets, _ = rows
    outs = []
    for garbage in (0.0, 1e4):
        cache = cache_of(model, prompts[:1])
        cache.keys = [a + garbage for a in cache.keys]
        cache.values = [a - garbage for a in cache.values]
        outs.append(feed(model, cache, targets[:1], [0], 5))
    np.testing.assert_array_equal(*map(np.array, outs))


@pytest.mark.parametrize("offsets", [[0], [0, -1], []])
def test_offsets_that_do_not_fit_are_refused(model, rows, offsets):
    with pytest.raises(ValueError, match="2 rows"):
        model.decode(mx.zeros((2, 1), mx.int32), cache_of(model, rows[0][:2]), offsets)


@cpu_allocation
@pytest.mark.parametrize("passes", [0, math.inf], ids=["compiled", "plain"])
@pytest.mark.parametrize("offsets", [[5, 5], [5, 9]])
def test_decoding_is_in_place(model, rows, offsets, passes, monkeypatch):
    """Neither the model nor the graph keeps arrays of an earlier pass."""
    monkeypatch.setattr(compiled, "passes_before_compiling", lambda: passes)
    before = mx.get_active_memory()
    cache = cache_of(model, [rows[0][1], rows[0][4]], capacity=256 * SLOT_MULTIPLE)
    size = sum(a.nbytes for a in cache.keys + cache.values)
    for step in range(4):
        tokens = mx.zeros((2, 1), mx.int32)
        for i in range(3):  # several passes in one graph, as a draft model decodes
            logits = model.decode(tokens, cache, [o + 3 * step + i for o in offsets])
            tokens = mx.argmax(logits, axis=-1)
        mx.eval(tokens)
        del logits, tokens
        if step == 0:
            mx.reset_peak_memory()
    assert size <= mx.get_peak_memory() - before < 1.2 * size


@pytest.mark.parametrize(
    ("cpu", "cuda", "widths"),
    [(True, False, (20, 20)), (False, False, (32, 32)), (False, True, (20, 32))],
)
def test_gpus_use_few_cache_sizes(monkeypatch, cpu, cuda, widths):
    """Sources are padded to multiples of 32, except one row on CUDA; slots to powers of two."""
    monkeypatch.setattr("mlx_t5.network.cache.FEW_SHAPES", not cpu)
    monkeypatch.setattr("mlx_t5.network.cache.ON_CUDA", cuda)
    assert (source_width(20, 1), source_width(20, 2)) == widths
    slots = [0, 1, 32, 33, 65, 97, 129, 257]
    assert [round_up(n) // SLOT_MULTIPLE for n in slots] == (
        [1, 1, 1, 2, 3, 4, 5, 9] if cpu else [1, 1, 1, 2, 4, 4, 8, 16]
    )
