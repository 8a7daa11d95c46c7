"""Tests how adapter_config.json sets layers and scale, and which entries are refused."""

import json
import math

import pytest
from peft import LoraConfig as LoraOfPeft
from peft.tuners.tuners_utils import check_target_module_exists

from adapters import PLAIN
from mlx_t5.checkpoints.adapters import LoraConfig
from mlx_t5.errors import UserError

ENCODER = [f"encoder.block.{i}.layer.0.SelfAttention.{part}" for i in range(3) for part in "qv"]
CROSS = [f"decoder.block.{i}.layer.1.EncDecAttention.{part}" for i in range(3) for part in "qv"]
LAYERS = [*ENCODER, *CROSS, "shared", "lm_head", "decoder.block.0.layer.2.DenseReluDense.wo"]


def read(**entries) -> LoraConfig:
    return LoraConfig.from_dict({**PLAIN, **entries})


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"target_modules": ["Attention.q"]},  # a suffix of a name begins at a dot
        {"target_modules": ["SelfAttention.q", "wo", CROSS[1]]},
        {"exclude_modules": ["SelfAttention.q"]},
        {"target_modules": ["lm_head", "q"], "exclude_modules": [CROSS[3]]},
    ],
)
def test_target_layers_are_those_of_peft(entries):
    peft_config = LoraOfPeft(**{"target_modules": ["q"], **entries})
    expected = [layer for layer in LAYERS if check_target_module_exists(peft_config, layer)]
    assert read(**entries).targets(LAYERS) == expected


def test_default_and_all_linear_targets_are_those_of_peft():
    all_linear = read(target_modules="All-Linear").targets(LAYERS)
    assert all_linear == [layer for layer in LAYERS if "." in layer]
    assert read(target_modules=None) == read(target_modules=["q", "v"])  # PEFT's default for T5


def test_the_scale_follows_rank_and_alpha():
    assert read(r=4, lora_alpha=2).scale == 2 / 4
    assert read(r=3, lora_alpha=5, use_rslora=True).scale == 5 / math.sqrt(3)
    usual = LoraConfig.from_dict({"peft_type": "LORA"})
    assert (usual.r, usual.scale) == (8, 1.0)


def test_irrelevant_entries_of_peft_are_ignored():
    neutral = {
        "inference_mode": True,
        "lora_dropout": 0.1,
        "init_lora_weights": "eva",
        "bias": "lora_only",
        "fan_in_fan_out": True,
        "modules_to_save": [],
        "use_dora": False,
        "rank_pattern": {},
        "layers_pattern": None,
        "a_size_of_tomorrow": 7,
    }
    assert read(**neutral) == read()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3 cannot be merged; only LORA can"),
        ({"peft_type": None, "lora_parameters": {"rank": 8}}, "is of an mlx-lm adapter"),
        ({"bias": True}, "bias True cannot be merged here"),
        ({"a_variant_of_tomorrow": {"rank": 2}}, "{'rank': 2} cannot be merged here"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16 cannot be merged here"),
        ({"target_modules": "(q|v)"}, "target_modules (q|v) cannot be merged here"),
        ({"target_modules": ["q", 5]}, "target_modules ['q', 5] cannot be merged here"),
        ({"lora_bias": True}, "lora_bias True cannot be merged here"),
        ({"rank_pattern": {"q": 2}}, "rank_pattern {'q': 2} cannot be merged here; merge it with"),
        ({"layers_to_transform": 0}, "layers_to_transform 0 cannot be merged here; merge it with"),
        ({"r": 0}, "r is 0; it must be a whole number from 1"),
        ({"lora_alpha": math.nan}, "; it must be a number from"),
        ({"use_rslora": 1}, "use_rslora is 1; it must be True or False"),
    ],
)
def test_unsupported_entries_are_refused_by_name(entries, message):
    with pytest.raises(UserError) as refused:
        read(**entries)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read .*; give the folder of a PEFT adapter"):
        LoraConfig.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([PLAIN]))
    with pytest.raises(UserError, match="does not hold an object"):
        LoraConfig.read(tmp_path)
