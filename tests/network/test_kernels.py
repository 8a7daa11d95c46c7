"""How many kernels a decoder layer launches on a GPU: one for each operation that computes."""

import math
import re
from collections import Counter

import pytest

from mlx_t5.backend import mx
from mlx_t5.network import attention, cache, layers, linear
from mlx_t5.network.config import T5Config
from model import T5

# They only look at memory in another way; a reshape copies if its input has been transposed.
FREE = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
SHAPE = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "vocab_size": 96,
}


def kernels(graph: str) -> Counter:
    """The operations of a graph that compute something, by name, from its description in DOT."""
    names = dict(re.findall(r'(\d+) \[label ?= ?"([^"]+)"', graph))
    maker = {array: names[node] for node, array in re.findall(r'(\d+) -> "(\w+)"', graph)}
    count = Counter(name for name in maker.values() if name not in FREE)  # of one array each
    inputs = [(maker.get(array), names[n]) for array, n in re.findall(r'"(\w+)" -> (\d+)', graph)]
    count["Copy"] += inputs.count(("Transpose", "Reshape"))
    return count


@pytest.fixture
def layer(monkeypatch, tmp_path):
    """Counts the kernels of a layer whose norms are fused, and attention as the device has it."""
    # A CPU has neither of them as one operation; these stand for them.
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, weight, eps: mx.erf(x))
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda q, k, v, scale, mask: mx.erfinv(q)
    )
    monkeypatch.setattr(linear, "forms", lambda *_: ())
    monkeypatch.setattr(layers, "passes_before_compiling", lambda: math.inf)

    def count(length, device, padded, **config):
        for module in (attention, cache):
            monkeypatch.setattr(module, "ON_CUDA", device == "CUDA")
        counts = []
        for depth in (1, 2):
            shape = {**SHAPE, "num_layers": 1, "num_decoder_layers": depth, **config}
            model = T5(T5Config.from_dict(shape))
            model.join()
            mask = mx.arange(8)[None] < 5 if padded else None
            cache_ = model.cache(model.encode(mx.zeros((1, 8), mx.int32)), mask)
            mx.eval(model.parameters(), cache_.state)
            logits = model.decode(mx.zeros((1, length), mx.int32), cache_, [0])
            mx.export_to_dot(str(tmp_path / "pass"), logits, *cache_.state)
            counts.append(kernels((tmp_path / "pass").read_text()))
        return counts[1] - counts[0]

    return count


@pytest.mark.parametrize(
    ("device", "padded", "length", "count"),
    [
        ("Metal", True, 1, 14),
        ("Metal", True, 5, 16),
        ("CUDA", False, 1, 16),  # a row alone is not padded there
        ("CUDA", False, 5, 18),
        ("CUDA", True, 1, 18),
        ("CUDA", True, 5, 20),
    ],
)
@pytest.mark.parametrize("act", ["relu", "gated-gelu"])
def test_kernels_of_a_decoder_layer(layer, device, padded, length, count, act):
    kernels = layer(length, device, padded, feed_forward_proj=act)
    assert kernels["Erf"] == 3 and kernels["Softmax"] + kernels["ErfInv"] == 2  # norms, attention
    assert kernels["Softmax"] == (0 if device == "Metal" else 2 if padded else 1)
    assert kernels["AddMM"] == 3 + kernels["Softmax"]  # the residuals, and masks
    assert kernels["Copy"] == (0 if length == 1 else 2)  # what attention gives, for `o`
    activation = 3 if act == "gated-gelu" else 1  # x ** 3, the rest of gelu, and the product
    assert sum(kernels.values()) == count - 1 + activation, kernels
