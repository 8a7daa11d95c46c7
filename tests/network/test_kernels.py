"""How many kernels a pass launches on a GPU: one for each operation that computes."""

import re
from collections import Counter

import pytest

from mlx_t5.backend import mx
from mlx_t5.network import linear
from mlx_t5.network.config import T5Config
from model import T5

# They only look at memory in another way.
FREE = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
SHAPE = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "vocab_size": 96,
}


@pytest.fixture
def operations(monkeypatch, tmp_path):
    """Counts the operations of a pass over one position, where norms and attention are fused."""
    # A CPU has neither of them as one operation; these stand for them.
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, weight, eps: mx.erf(x))
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda q, k, v, scale, mask: mx.erfinv(q)
    )
    monkeypatch.setattr(linear, "fastest", lambda *_: linear.natural)

    def count(**config):
        model = T5(T5Config.from_dict({**SHAPE, "num_layers": 1, **config}))
        model.join()
        cache = model.cache(model.encode(mx.zeros((1, 8), mx.int32)))
        mx.eval(model.parameters(), cache.state)
        logits = model.decode(mx.array([[0]]), cache, [0])
        mx.export_to_dot(str(tmp_path / "pass"), logits, *cache.state)
        named = re.findall(r'label ?= ?"(\w+)"', (tmp_path / "pass").read_text())
        return Counter(name for name in named if name not in FREE)

    return count


def test_operations_of_a_decoder_layer(operations):
    layer = operations(num_decoder_layers=2) - operations(num_decoder_layers=1)
    assert layer["Erf"] == 3 and layer["ErfInv"] == 2  # norms and attention
    assert layer["AddMM"] == 3  # the residuals
    assert sum(layer.values()) == 14, layer
