"""A target's weights are converted in place, and its passes timed. No time is judged."""

import pytest

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.benchmarks import weight_types
from random_models import random_t5


@pytest.fixture(autouse=True)
def mac(monkeypatch):
    monkeypatch.setattr(weight_types, "cpu_only", lambda: False)
    monkeypatch.setattr(weight_types, "ON_CUDA", False)


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_quantized_and_joined_layers_are_timed(mode):
    target = random_t5(mode)
    record = weight_types.fp_mode(target, 5, 0.01)
    assert record["mode"] == "mxfp4" and record["speed_up"] > 0
    assert {1, 2, 4, 5, 6} <= set(record["v"])
    layer = target.decoder.layers[1]
    assert layer.feed_forward.wo.mode == "mxfp4" and target.dtype == getattr(mx, mode)
    assert len(layer.self_attention.block("qkv").inputs) == 1


@pytest.mark.parametrize("mode", ["bfloat16", "4 bit"])
def test_passes_in_both_16_bit_types_are_timed(mode, monkeypatch):
    target, timed = random_t5(mode), []

    def timer(target, source):
        timed.append({str(a.dtype)[9:] for _, a in tree_flatten(target.decoder.parameters())})
        return lambda positions: 2.0 if target.dtype == mx.bfloat16 else 1.0

    types = {name: array.dtype for name, array in tree_flatten(target.parameters())}
    monkeypatch.setattr(weight_types, "timer", timer)
    assert weight_types.float16(target, 5, 0.01) == {1: 2.0, 5: 2.0}
    assert weight_types.faster_dtype({1: 2.0, 5: 2.0}).endswith("take --dtype float16.")
    assert "float16" in timed[1] and "bfloat16" not in timed[1] and "float16" not in timed[0]
    assert {name: array.dtype for name, array in tree_flatten(target.parameters())} == types
    assert len(target.decoder.layers[1].self_attention.block("qkv").inputs) == 1
