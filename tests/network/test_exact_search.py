"""Tests the check before exact decoding, on devices whose sums depend on a row's place."""

import pytest

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.model import T5
from mlx_t5.network import exact, linear
from mlx_t5.network.exact import ExactTarget
from random_models import random_t5


@pytest.fixture
def model():
    return random_t5("bfloat16")


def halves(x, weight, dtype=mx.float32):
    """Returns the product as a sum of two halves, computed in the type `dtype`."""
    half, out_dtype = x.shape[1] // 2, x.dtype
    x, weight = x.astype(dtype), weight.astype(dtype)
    return (x[:, half:] @ weight[:, half:].T + x[:, :half] @ weight[:, :half].T).astype(out_dtype)


@pytest.fixture
def device(monkeypatch):
    """Returns `device(rule)`, which sums rows with rule(place, rows) in a different order."""

    def install(rule, dtype=mx.float32):
        def product(x, weight):
            other = mx.array([rule(i, len(x)) for i in range(len(x))])[:, None]
            return mx.where(other, halves(x, weight, dtype), linear.as_written(x, weight))

        monkeypatch.setattr(linear, "faster_forms", lambda *_: ((range(10**4), product),))

    return install


def test_this_device_keeps_the_bits_at_width_8(model):
    target = exact.exact_target(model, 2, num_draft=5)
    assert (target.width, target.rows[-1]) == (8, 2)


def test_a_larger_width_is_tried_if_8_fails(model, device):
    device(lambda place, rows: rows % 16 and place == rows - 1)
    assert exact.exact_target(model, 1, num_draft=5).width == 16


def test_exact_decoding_is_refused_in_one_line_if_no_width_holds(model, device):
    device(lambda place, rows: place == 0)
    with pytest.raises(UserError, match="8 and 16 and 32 positions") as error:
        exact.exact_target(model, 1, num_draft=5)
    assert "\n" not in str(error.value)


def test_only_numbers_of_rows_with_the_same_bits_are_used(model, device):
    device(lambda place, rows: rows < 32)
    assert exact.exact_row_counts(model, 8, 8) == [4, 8]


def test_a_sum_that_depends_on_the_place_is_found_with_any_weights(device):
    device(lambda place, rows: place == 5)
    for mode in ("float16", "bfloat16"):
        assert exact.exact_row_counts(random_t5(mode), 1, 8) == []


def test_the_check_covers_attention(model, monkeypatch):
    attention = T5.attention

    def place_matters(queries, keys, values, mask):
        out = attention(queries, keys, values, mask)
        last = mx.arange(queries.shape[2])[:, None] == queries.shape[2] - 1
        return mx.where(last & (keys.shape[2] == 257), out * 1.01, out)

    assert exact.attention_is_exact(model, 8)
    monkeypatch.setattr(T5, "attention", staticmethod(place_matters))
    assert not exact.attention_is_exact(model, 8)


def test_the_check_covers_the_whole_decoder(model, device):
    """This check finds a number of rows whose products differ from those of other numbers."""
    device(lambda place, rows: rows == 8, mx.bfloat16)
    assert not exact.decoder_is_exact(ExactTarget(model, 8, (1, 2)))
    assert exact.decoder_is_exact(ExactTarget(model, 8, (2,)))


def test_a_query_sees_as_many_slots_in_any_pass(model, monkeypatch):
    """On a device whose attention depends on the number of slots, a row keeps its bits."""
    attention = T5.attention
    scaled = lambda q, k, v, *how: attention(q, k, v, *how) * (1 + k.shape[2] / 99)  # noqa: E731
    monkeypatch.setattr("model.attention", scaled)
    assert exact.decoder_is_exact(ExactTarget(model, 8, (1, 2)))
