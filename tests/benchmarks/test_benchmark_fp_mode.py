"""A target is changed to an fp mode in place and timed before and after. No time is judged."""

import pytest

from benchmarks import fp_mode
from mlx_t5.backend import mx, nn
from random_models import random_t5


@pytest.fixture
def mac(monkeypatch):
    """Makes the code behave as on a Mac's GPU."""
    monkeypatch.setattr(fp_mode, "cpu_only", lambda: False)
    monkeypatch.setattr(fp_mode, "ON_CUDA", False)


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_quantized_and_joined_layers_are_timed(mac, mode):
    target = random_t5(mode)
    record = fp_mode.measured(target, 5, 0.01)
    assert record["mode"] == "mxfp4" and record["speed_up"] > 0
    assert record["v"][1] == 1 and {1, 2, 4, 5, 6} <= set(record["v"])
    layer = target.decoder.layers[1]
    assert isinstance(layer.feed_forward.wo, nn.QuantizedLinear)
    assert (
        layer.feed_forward.wo.mode == "mxfp4" and len(layer.self_attention.block("qkv").inputs) == 1
    )
    assert isinstance(target.shared, nn.Embedding) and target.dtype == getattr(mx, mode)
    assert fp_mode.table_text(record).startswith("mxfp4: ")
