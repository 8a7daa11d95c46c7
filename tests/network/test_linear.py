"""All forms of a product are equal, and layers over the same input are one product."""

import numpy as np
import pytest

from mlx_t5.backend import mx, nn
from mlx_t5.network import linear
from mlx_t5.network.linear import (
    Matrix,
    as_two_rows,
    as_written,
    in_tiles,
    join_layers,
    matrices,
    weight_first,
)

WIDTH = 1024
HIGH = 512


@pytest.mark.parametrize(
    ("form", "rows"),
    [(form, rows) for form in (as_written, in_tiles, weight_first) for rows in (1, 2, 6, 16)]
    + [(as_two_rows, 1)],
)
@pytest.mark.parametrize("outputs", [384, 500])  # tiles divide 384 only
def test_every_form_gives_the_same_product(form, rows, outputs):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, WIDTH), np.float32) for n in (rows, outputs))
    out = form(mx.array(x), mx.array(weight))
    assert out.shape == (rows, outputs)
    np.testing.assert_allclose(np.array(out), x @ weight.T, atol=1e-3)


def test_a_tied_embedding_multiplies_as_the_head():
    x = mx.random.normal((3, WIDTH))
    for head in (nn.Embedding(HIGH, WIDTH), nn.Embedding(HIGH, WIDTH).to_quantized(32, 8)):
        np.testing.assert_allclose(Matrix.of(head).times(x), head.as_linear(x), atol=1e-3)


def layers(bits=(), outputs=(64, 64, 32)):
    """Returns linear layers over 64 inputs, quantized to `bits` if given."""
    linears = [nn.Linear(64, n, bias=False) for n in outputs]
    return [linears[i].to_quantized(32, b) for i, b in enumerate(bits)] or linears


@pytest.mark.parametrize("bits", [(), (4, 4, 4)])
def test_layers_over_the_same_input_are_one_product(bits):
    own, x = layers(bits), mx.random.normal((3, 64))
    apart = [layer(x) for layer in own]
    mx.eval(apart)
    join_layers(*own)
    (matrix,) = matrices(*own)
    np.testing.assert_allclose(matrix.times(x), mx.concatenate(apart, axis=1), atol=1e-5)


def new_weight(layers):
    join_layers(*layers)
    layers[1].weight = mx.ones((64, 64))
    return layers


@pytest.mark.parametrize("own", [new_weight(layers()), layers((4, 4, 8)), layers()])
def test_unsuitable_layers_are_not_joined(own):
    """A layer has a new weight or a different kind, or the layers were never joined."""
    x = mx.random.normal((3, 64))
    if "scales" in own[0]:
        join_layers(*own)
    parts = matrices(*own)
    assert len(parts) == 3
    for part, layer in zip(parts, own, strict=True):
        np.testing.assert_array_equal(part.times(x), layer(x))


@pytest.mark.parametrize("form", [as_written, weight_first])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "wider residual", "quantized"])
def test_a_product_adds_the_residual(monkeypatch, form, kind):
    """The sum has the residual's type, so no precision is lost to the weight's type."""
    forms = ((range(3, 4), form),) if form is not as_written else ()
    monkeypatch.setattr(linear, "faster_forms", lambda *_: forms)
    (layer,), x = layers((8,) if kind == "quantized" else (), (64,)), mx.random.normal((3, 64))
    if kind in ("bfloat16", "wider residual"):
        layer.weight, x = layer.weight.astype(mx.bfloat16), x.astype(mx.bfloat16)
    residual = mx.random.normal((3, 64), mx.bfloat16 if kind == "bfloat16" else mx.float32)
    out = Matrix.of(layer).times(x, residual)
    assert out.dtype == residual.dtype
    expected = residual.astype(mx.float32) + layer(x).astype(mx.float32)
    tolerance = 0.05 if kind == "bfloat16" else 1e-5
    np.testing.assert_allclose(out.astype(mx.float32), expected, atol=tolerance)
