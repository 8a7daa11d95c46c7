import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.disk import BUNDLED
from mlx_t5.model import load
from mlx_t5.network.encoding import cache_of, encoder_states, padded


def test_states_depend_on_neither_order_nor_neighbors_of_sources():
    model, _ = load(BUNDLED / "target", "float32")
    sources = [[5] * 90 + [1], [7, 8, 1], [9] * 200 + [1], [7, 8, 1], [11, 12, 13, 1]]
    for source, states in zip(sources, encoder_states(model, sources), strict=True):
        alone = model.encode(mx.array([source]))[0]
        np.testing.assert_allclose(np.array(states), np.array(alone), atol=1e-4)


@pytest.mark.parametrize("cuda", [False, True])
def test_the_only_source_needs_no_mask_on_cuda(monkeypatch, cuda):
    """Several sources are padded as on every GPU."""
    monkeypatch.setattr("mlx_t5.network.cache.FEW_SHAPES", True)
    monkeypatch.setattr("mlx_t5.network.cache.ON_CUDA", cuda)
    model, _ = load(BUNDLED / "target")
    for sources, alone in (([[5, 6, 1]], cuda), ([[5, 6, 1], [7, 1]], False)):
        width = 3 if alone else 32
        ids, mask = padded(sources, 0)
        assert ids.shape == (len(sources), width) and (mask is None) == alone
        cache = cache_of(model, sources)
        assert (cache.source, cache.mask is None) == (width, alone)
