"""A target is changed to an fp mode in place and timed before and after. No time is judged."""

import pytest

from benchmarks import fp_mode
from mlx_t5.backend import mx
from random_models import random_t5


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_quantized_and_joined_layers_are_timed(monkeypatch, mode):
    monkeypatch.setattr(fp_mode, "cpu_only", lambda: False)  # as on a Mac's GPU
    monkeypatch.setattr(fp_mode, "ON_CUDA", False)
    target = random_t5(mode)
    record = fp_mode.measured(target, 5, 0.01)
    assert record["mode"] == "mxfp4" and record["speed_up"] > 0
    assert {1, 2, 4, 5, 6} <= set(record["v"])
    layer = target.decoder.layers[1]
    assert layer.feed_forward.wo.mode == "mxfp4" and target.dtype == getattr(mx, mode)
    assert len(layer.self_attention.block("qkv").inputs) == 1
