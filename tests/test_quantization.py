"""quantization.py: the same numbers as nn.quantize, and a clear word about what MLX lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoints
from backend import UserError, mx, nn, tree_flatten
from checkpoints import TINY, arrays
from convert import convert
from model import load
from quantization import MODES, Quantization


@pytest.fixture
def tiny(tmp_path) -> Path:
    return checkpoints.tiny(tmp_path / "source")


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    (("affine", 4, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)),
)
def test_defaults_of_each_mode(mode, bits, group):
    assert Quantization.choose(mode=mode) == Quantization(group, bits, mode)


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"bits": 7}, "--q-bits 7 does not exist in mode affine; choose 2, 3, 4, 5, 6, 8"),
        ({"bits": 0}, "--q-bits 0 does not exist"),
        ({"bits": 9}, "--q-bits 9 does not exist"),
        ({"group_size": 16}, "--q-group-size 16 does not exist in mode affine; choose 32, 64, 128"),
        ({"mode": "mxfp4", "bits": 8}, "--q-bits 8 does not exist in mode mxfp4; choose 4"),
        ({"mode": "nvfp4", "group_size": 32}, "--q-group-size 32 .* mode nvfp4; choose 16"),
        ({"mode": "int4"}, "unknown quantisation mode 'int4'; known: affine, mxfp4, mxfp8, nvfp4"),
    ),
)
def test_contradictory_options(options, message):
    with pytest.raises(UserError, match=message):
        Quantization.choose(**options)


EVERY_MODE = [
    (mode, bits, group) for mode in MODES for bits in MODES[mode][0] for group in MODES[mode][1]
]


@pytest.mark.parametrize(("mode", "bits", "group"), EVERY_MODE)
def test_quantised_as_mlx_does_it(tiny, tmp_path, mode, bits, group):
    """The output holds what `nn.quantize` makes of the same model, layer by layer."""
    options = {"q_mode": mode, "q_bits": bits, "q_group_size": group}
    out = convert(tiny, tmp_path / "out", quantize=True, dtype="float32", **options)
    how = {"group_size": group, "bits": bits, "mode": mode}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == how
    model, _ = load(tiny, "float32")

    def wanted(path: str, layer: nn.Module) -> bool:
        is_layer = isinstance(layer, nn.Linear) and path != "lm_head"
        return is_layer and layer.weight.shape[-1] % group == 0

    nn.quantize(model, group, bits, mode=mode, class_predicate=wanted)
    expected, converted = dict(tree_flatten(model.parameters())), arrays(out)
    assert set(converted) == set(expected)
    for name, array in expected.items():
        assert array.dtype == converted[name].dtype and mx.array_equal(array, converted[name]), name
    ids = mx.array([[5, 3, 9, 1]])
    assert mx.array_equal(load(out, "float32")[0](ids, ids), model(ids, ids))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_quantised_scales_have_the_models_type(tiny, tmp_path, dtype):
    """With float16, `wo` computes in float32, so its scales and offsets are float32 too."""
    converted = arrays(convert(tiny, tmp_path / "out", quantize=True, dtype=dtype))
    for name, array in converted.items():
        if ".relative" in name or name == "shared.weight" or "norm" in name:
            assert array.dtype == getattr(mx, dtype) and name.endswith(".weight")
        elif name.endswith(".weight"):
            assert array.dtype == mx.uint32
        else:
            kept = dtype == "float16" and ".wo." in name
            assert array.dtype == (mx.float32 if kept else getattr(mx, dtype))


def test_layers_that_do_not_divide_into_groups(tmp_path, capsys):
    config = TINY | {"d_ff": 96}
    checkpoints.save(checkpoints.random_state(config), tmp_path / "in", config=config)
    out = convert(tmp_path / "in", tmp_path / "out", quantize=True)
    names = set(arrays(out))
    assert "encoder.layers.0.feed_forward.wi.scales" in names  # rows of 64
    assert "encoder.layers.0.feed_forward.wo.scales" not in names  # rows of 96
    assert "4 layers do not divide into groups" in capsys.readouterr().err
    load(out)
    with pytest.raises(UserError, match="no layer's rows divide into groups of 128; choose"):
        convert(tmp_path / "in", tmp_path / "out2", quantize=True, q_group_size=128)
    assert not (tmp_path / "out2").exists()
