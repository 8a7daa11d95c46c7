"""With passes of one shape, the bits of a row depend only on the row."""

import math
import random

import numpy as np
import pytest

from devices import exact_or_refused, skip_narrow_4_bits
from fake_model import small
from mlx_t5.backend import REFERENCE_BLAS, blas_name, mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.errors import UserError
from mlx_t5.network import compiled, linear
from mlx_t5.network.exact import WIDTHS, ExactTarget, exact_target
from random_models import V, random_t5

WIDTH, ROWS, LENGTH = 8, 8, 8
MODES = {"float32": 4, "float16": 4, "bfloat16": 8, "4 bit": 8}  # numbers of runs with eight rows


@pytest.fixture
def another_order_for_many_rows(monkeypatch):
    """Simulates a device that changes the order of sums for products of more than three rows.

    Without a GPU, 16-bit products always have the same order of sums.
    """

    def by_rows(x, weight):
        half = x.shape[1] // 2
        if len(x) < 4 or weight.dtype == mx.float32:
            return linear.as_written(x, weight)
        return linear.as_written(x[:, :half], weight[:, :half]) + linear.as_written(
            x[:, half:], weight[:, half:]
        )

    monkeypatch.setattr(linear, "faster_forms", lambda *_: ((range(10**4), by_rows),))
    monkeypatch.setattr(
        compiled, "passes_before_compiling", lambda: math.inf
    )  # like the forms for CPUs


def texts(rng, count):
    """Returns random sources and targets of `count` rows."""
    sources = [[rng.randrange(2, V) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    return sources, [[rng.randrange(2, V) for _ in range(LENGTH + WIDTH)] for _ in range(count)]


def caches(model, sources):
    cache = model.cache(model.encode(mx.array([sources[0]])), None, LENGTH + 2 * WIDTHS[-1])
    for source in sources[1:]:
        cache.extend(model.cache(model.encode(mx.array([source])), None, LENGTH + 2 * WIDTHS[-1]))
    return cache


def logits_of(model, sources, targets, rng=None):
    """Returns logits (LENGTH, V) of each row, decoded by token or in random blocks."""
    cache, at = caches(model, sources), [0] * len(sources)
    all_logits = [[] for _ in sources]
    while min(at) < LENGTH:
        size = rng.randint(1, WIDTH) if rng else 1
        block = mx.array([t[i : i + size] for t, i in zip(targets, at, strict=True)])
        logits = np.array(model.decode(block, cache, list(at)))
        for row, start in enumerate(at):
            count = min(rng.randint(1, size) if rng else 1, LENGTH - start)
            all_logits[row] += list(logits[row, :count])
            at[row] += count
    return np.array(all_logits)


@pytest.mark.slow
@pytest.mark.usefixtures("another_order_for_many_rows")
@pytest.mark.parametrize("mode, runs", MODES.items(), ids=MODES)
@exact_or_refused
def test_bits_depend_on_neither_blocks_nor_neighbors(mode, runs):
    """Each row is decoded twice: by token, and in blocks beside other rows."""
    skip_narrow_4_bits(4 if mode == "4 bit" else 16)
    model, rng = random_t5(mode), random.Random(7)
    target, differ = exact_target(model, ROWS, WIDTH - 1), 0
    sources, targets = texts(rng, 2 * ROWS)
    plainly = [logits_of(model, [s], [t]) for s, t in zip(sources[:2], targets[:2], strict=True)]
    regular = np.concatenate([logits_of(target, sources[i::2], targets[i::2]) for i in range(2)])
    regular = dict(zip([*range(0, 2 * ROWS, 2), *range(1, 2 * ROWS, 2)], regular, strict=True))
    for _ in range(runs):
        rows = rng.sample(range(2 * ROWS), rng.choice([ROWS, ROWS, ROWS, 3, 1]))
        some = [sources[i] for i in rows], [targets[i] for i in rows]
        for row, logits in zip(rows, logits_of(target, *some, rng), strict=True):
            assert (logits == regular[row]).all()
    for i in range(2):
        differ += (logits_of(model, [sources[i]], [targets[i]], rng) != plainly[i]).any()
        assert np.abs(plainly[i] - regular[i]).max() < 0.08 * np.abs(regular[i]).max()
    # MLX's own products add in one order for every shape.
    assert differ or blas_name() == REFERENCE_BLAS, "without padding some bits differ"


def proposers(target):
    """Returns every kind of draft and drafter."""
    good_draft = DraftModel(small(random_t5("float32", noise=0.05)), target)
    return {
        "none": {},
        "good": {"draft_model": good_draft},
        "bad": {"draft_model": DraftModel(random_t5("float32", seed=9), target)},
        "copy": {"copy": SourceCopy()},
        "both": {"draft_model": good_draft, "copy": SourceCopy()},
    }


@pytest.fixture(scope="module")
def decoders():
    """Returns a decoder with each of `proposers`; all share one checked 4-bit target."""
    model = random_t5("4 bit")
    all_decoders = {
        name: SpeculativeDecoder(model, num_draft=5, exact=True, **proposer)
        for name, proposer in proposers(model).items()
    }
    for decoder in all_decoders.values():
        decoder.target = all_decoders["none"].target
    return all_decoders


@pytest.mark.slow
@pytest.mark.usefixtures("costs_of_a_cpu")
@pytest.mark.parametrize("temp", [0.0, 0.8])
@exact_or_refused
def test_tokens_depend_on_neither_draft_nor_neighbors(decoders, temp):
    sources, _ = texts(random.Random(3), 5)
    seeds = list(range(5))
    how = {"max_tokens": 12, "temp": temp, "top_p": 0.95, "batch_size": 2}
    regular = [r.tokens for r in decoders["none"].generate(sources, seed=seeds, **how)]
    assert len({token for tokens in regular for token in tokens}) > (8 if temp else 2)
    cases = set()
    for name, decoder in decoders.items():
        for num_draft in (1, 7, "auto") if name == "good" else (5,):
            results = decoder.generate(sources, seed=seeds, num_draft=num_draft, **how)
            assert [r.tokens for r in results] == regular
            cases |= {(name, num_draft, r.stats.accepted > 0) for r in results}
        alone = decoder.generate(sources[3], seed=3, **how)
        assert alone.tokens == regular[3]
        chunks = list(decoder.stream(sources[3], seed=3, **how))
        assert chunks[-1].result.tokens == regular[3]
    assert {("good", num_draft, True) for num_draft in (1, 7, "auto")} <= cases


@exact_or_refused
def test_a_draft_like_the_target_is_mostly_kept_where_text_is_sampled():
    target = random_t5()
    decoder = SpeculativeDecoder(target, random_t5(), num_draft=4, exact=True)
    sources, _ = texts(random.Random(4), 4)
    results = decoder.generate(sources, max_tokens=40, temp=1.0, batch_size=1)
    assert sum(r.stats.acceptance_rate for r in results) / 4 > 0.95


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"num_draft": 8}, "num_draft is 8; it must be 7 at most"),
        ({"delta": 0.2}, "delta"),
        ({"num_beams": 2}, "num_beams"),
    ],
)
@exact_or_refused
def test_settings_that_break_exactness_are_refused(decoders, settings, reason):
    for decode in (decoders["good"].generate, decoders["good"].stream):
        with pytest.raises(UserError, match=reason):
            decode([5, 6, 1], batch_size=2, **settings)


def test_equal_prompts_share_the_source_and_nothing_else():
    target = ExactTarget(random_t5(), 8, (1, 2))
    cache = caches(target, [[5, 6, 1]])
    cache.filter([0, 0])
    first, second = cache.rows
    assert first.cross[0] is second.cross[0]
    target.decode(mx.array([[0, 7], [0, 9]]), cache, [0, 0])
    assert not mx.array_equal(first.keys[0][:, :, 1], second.keys[0][:, :, 1]).item()
