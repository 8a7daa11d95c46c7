"""Tests which layers are trained, bad options, and the base named by an adapter."""

import json
from dataclasses import replace

import pytest

from mlx_t5.checkpoints.adapter_config import LoraConfig
from mlx_t5.errors import UserError
from mlx_t5.training.fine_tuning import adapt, base_name, paths, targets, unfreeze_last
from mlx_t5.training.learner import Learner
from mlx_t5.training.loss import token_loss
from model import load

LORA = LoraConfig(r=3, target_modules="all-linear")


def test_the_last_layers_alone_are_trained(reference_of):
    model, _ = load(reference_of("byt5").folder, "float32")
    unfreeze_last(model, 1)
    names = set(Learner(model, token_loss(model, 0.0), 10, 0.01).begin().weights)
    assert {".".join(name.split(".")[:3]) for name in names} == {
        "encoder.layers.5", "decoder.layers.1"
    }  # fmt: skip
    assert len(targets(model.config, LORA, -1)) == len(paths(model.config)) > 20


@pytest.mark.parametrize(
    "entries, num_layers, message",
    [
        ({"target_modules": ("q", "relative_attention_bias")}, -1, "s relative_attention_bias: th"),
        ({"target_modules": ("q", "all-linear")}, -1, "--target-modules all-linear: .* alone"),
        ({"target_modules": ("q", "block.0.layer.0.SelfAttention.v")}, 1, "SelfAttention.v: this"),
        ({"r": 33}, -1, "--r 33 is too large; encoder.block.0.* allows at most 32"),
    ],
)
def test_bad_layers_and_ranks_are_refused(reference_of, entries, num_layers, message):
    model, _ = load(reference_of("flan").folder, "float32")
    with pytest.raises(UserError, match=message):
        adapt(model, replace(LORA, **entries), num_layers)


@pytest.mark.parametrize("record", [{"model": "a/b"}, {"model": "a/b", "adapter": "c"}, None])
def test_an_adapter_names_the_base_that_its_weights_belong_to(tmp_path, record):
    """A folder with a merged adapter is no longer the model of its Hub id."""
    (tmp_path / "config.json").write_text(json.dumps({"converted_from": record}))
    expected = "a/b" if record == {"model": "a/b"} else str(tmp_path)
    assert base_name(tmp_path) == expected
