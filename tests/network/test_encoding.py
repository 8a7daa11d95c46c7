import numpy as np

from mlx_t5.backend import mx
from mlx_t5.cli.models import BUNDLED
from mlx_t5.network.encoding import encoder_states
from model import load


def test_the_order_and_the_neighbours_of_sources_do_not_matter_to_their_states():
    model, _ = load(BUNDLED / "target")
    sources = [[5] * 90 + [1], [7, 8, 1], [9] * 200 + [1], [7, 8, 1], [11, 12, 13, 1]]
    for source, states in zip(sources, encoder_states(model, sources), strict=True):
        alone = model.encode(mx.array([source]))[0]
        np.testing.assert_allclose(np.array(states), np.array(alone), atol=1e-4)
