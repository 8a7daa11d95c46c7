"""Indices out of bounds raise an error at the call, and correct indices do not."""

import os

import pytest

from index_checks import install, remove
from mlx_t5.backend import mx
from mlx_t5.backend.device import REHEARSE


@pytest.fixture(autouse=True)
def checked():
    install()
    yield
    if not os.environ.get(REHEARSE):
        remove()


X = mx.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mx.take_along_axis(mx.zeros((1, 0, 3)), mx.array([[[-1]]]), axis=1),
        lambda: mx.put_along_axis(X, mx.array([[0], [-4]]), mx.array(1), axis=-1),
        lambda: mx.take(X, mx.array(6)),
        lambda: X[None, 0, mx.array([-4])],
        lambda: X.__setitem__(mx.array([2]), 0),
    ],
)
def test_indices_out_of_bounds_are_an_error(call):
    with pytest.raises(IndexError, match=r"indices .* into an axis"):
        call()


def test_indices_within_bounds_are_accepted():
    assert mx.take_along_axis(X, mx.array([[2], [-3]]), axis=1).tolist() == [[2], [3]]
    assert mx.take(X, mx.array([-6, 5])).tolist() == [0, 5]
    assert X[..., None, mx.array([2])].shape == (2, 1, 1)
