"""Forms of a product: the same numbers, and each only where it is known to be faster."""

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.network import linear
from mlx_t5.network.linear import (
    Embedding,
    Linear,
    fastest,
    in_blocks,
    product,
    turned,
    twice,
    whole,
)

OPENBLAS, MKL = "OpenBLAS 0.3.21, {} kernels", "MKL 2026.2, {} kernels"
WIDTH = 1024
HIGH = 512


@pytest.mark.parametrize(
    ("form", "rows"),
    [(form, rows) for form in (whole, in_blocks, turned) for rows in (1, 2, 6, 16)] + [(twice, 1)],
)
@pytest.mark.parametrize("outputs", [384, 500])  # blocks divide the first
def test_every_form_is_the_same_product(form, rows, outputs):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, WIDTH), np.float32) for n in (rows, outputs))
    out = form(mx.array(x), mx.array(weight))
    assert out.shape == (rows, outputs)
    np.testing.assert_allclose(np.array(out), x @ weight.T, atol=1e-3)


SQUARE, NARROW, SMALL, HEAD = (1024, 1024), (3072, 768), (256, 256), (32128, 1024)


@pytest.mark.parametrize(
    ("blas", "shape", "forms"),
    [
        (OPENBLAS.format("SkylakeX"), SQUARE, {in_blocks: {1, 2, 4, 8}, whole: {9, 16, 64}}),
        (OPENBLAS.format("SkylakeX"), SMALL, {whole: {1, 8, 64}}),
        (OPENBLAS.format("Haswell"), HEAD, {whole: {1, 2, 4, 8, 9, 16, 64}}),
        (MKL.format("AVX-512"), NARROW, {whole: {1, 2, 64}, in_blocks: {4}, turned: {8, 9, 16}}),
        (MKL.format("general"), SQUARE, {whole: {1, 2, 4, 8, 9, 16, 64}}),
        (MKL.format("general"), NARROW, {twice: {1}, whole: {2, 4, 64}}),
        (MKL.format("general"), HEAD, {whole: {1, 2}, in_blocks: {3, 8, 64}}),
        (MKL.format("general"), SMALL, {whole: {1, 8, 64}}),
        ("MLX's reference BLAS", HEAD, {whole: {1, 2, 4, 8, 9, 16, 64}}),
    ],
)
def test_the_form_of_each_blas(blas, shape, forms):
    wanted = {rows: form for form, which in forms.items() for rows in which}
    assert {rows: fastest(rows, *shape, blas) for rows in wanted} == wanted


@pytest.fixture
def asked(monkeypatch):
    """The numbers of rows for which a form was looked up."""
    rows = []
    monkeypatch.setattr(linear, "cpu_only", lambda: True)
    monkeypatch.setattr(linear, "fastest", lambda m, *rest: rows.append(m) or turned)
    return rows


def test_layers_take_the_fastest_form(asked):
    layer, head = Linear(WIDTH, HIGH), Embedding(HIGH, WIDTH)
    x = mx.random.normal((3, WIDTH))
    np.testing.assert_array_equal(layer(x), turned(x, layer.weight))
    np.testing.assert_array_equal(head.as_linear(x), turned(x, head.weight))
    assert asked == [3, 3]


@pytest.mark.parametrize(("dtype", "cpu"), [(mx.bfloat16, True), (mx.float32, False)])
def test_other_types_and_gpus_take_the_natural_form(asked, monkeypatch, dtype, cpu):
    monkeypatch.setattr(linear, "cpu_only", lambda: cpu)
    x, weight = mx.ones((2, WIDTH), dtype), mx.ones((HIGH, WIDTH), dtype)
    assert product(x, weight).dtype == dtype
    assert asked == []
