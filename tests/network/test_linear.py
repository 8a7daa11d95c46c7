"""Products made of many small ones: the same numbers, and only where that is expected to pay."""

import ctypes

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.network import linear
from mlx_t5.network.linear import SMALL, Embedding, Linear, block_rows, product_in_parts


@pytest.mark.parametrize("rows", [1, 2, 6, 12])
@pytest.mark.parametrize("width", [1024, 1536])
def test_small_products_make_the_large_one(rows, width):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, width), np.float32) for n in (rows, 3 * 512))
    assert block_rows(rows, *weight.shape) not in (0, len(weight))
    out = product_in_parts(mx.array(x), mx.array(weight))
    assert out.shape == (rows, len(weight))
    np.testing.assert_allclose(np.array(out), x @ weight.T, atol=1e-3)


@pytest.mark.parametrize("m", [1, 4, 12])
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (32128, 1024), (1024, 4096), (250112, 4096)])
def test_blocks_divide_the_weight_and_are_small(m, n, k):
    block = block_rows(m, n, k)
    assert block and n % block == 0
    assert m * block * k <= SMALL < 2 * m * block * k or block == n & -n


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (13, 4096, 1024),  # many rows
        (1, 4096, 768),  # a narrow weight
        (1, 512, 1024),  # small as it is
        (1, 32100, 1024),  # only blocks of 4 rows divide it
        (4, 1024, 65536),  # not even 16 rows are small
    ],
)
def test_a_product_that_stays_whole(m, n, k):
    assert block_rows(m, n, k) == 0


def test_other_types_stay_whole():
    """OpenBLAS multiplies float32 alone."""
    x, weight = mx.ones((1, 1024), mx.bfloat16), mx.ones((2048, 1024), mx.bfloat16)
    out = product_in_parts(x, weight)
    assert out.dtype == mx.bfloat16
    assert mx.array_equal(out, x @ weight.T)


@pytest.mark.parametrize("pays", [True, False])
def test_layers_multiply_in_parts_where_that_pays(monkeypatch, pays):
    calls = []
    monkeypatch.setattr(linear, "small_products", lambda width: pays)
    monkeypatch.setattr(linear, "product_in_parts", lambda x, weight: calls.append(weight) or x)
    layer, head = Linear(8, 6), Embedding(6, 8)
    layer(mx.ones((1, 8)))
    head.as_linear(mx.ones((1, 8)))
    assert [weight.shape for weight in calls] == [(6, 8), (6, 8)] * pays


@pytest.mark.parametrize(
    ("platform", "cpu", "kernel", "expected"),
    [
        ("linux", True, b"Cooperlake", True),
        ("linux", True, b"Haswell", False),
        ("linux", True, None, False),
        ("linux", False, b"Cooperlake", False),
        ("darwin", True, b"Cooperlake", False),
    ],
)
def test_where_small_products_are_faster(monkeypatch, platform, cpu, kernel, expected):
    class Library:
        def __init__(self, name):
            if kernel is None:
                raise OSError(name)
            self.openblas_get_corename = lambda: kernel

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(linear, "cpu_only", lambda: cpu)
    monkeypatch.setattr(linear.sys, "platform", platform)
    assert linear.small_products(1024) is expected
    assert not linear.small_products(1023)
