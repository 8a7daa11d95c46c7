"""adapter_config.json: which layers, how strong; and what is refused by its name."""

import json
import math

import pytest
from peft import LoraConfig as LoraOfPeft
from peft.tuners.tuners_utils import check_target_module_exists

from adapters import PLAIN
from mlx_t5.checkpoints.adapter_config import Change, LoraConfig
from mlx_t5.checkpoints.adapter_patterns import WHOLE, matches
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
        {"target_modules": ["Attention.q"]},  # ends of names begin at a dot
        {"target_modules": ["SelfAttention.q", "wo", CROSS[1]]},
        {"target_modules": r"decoder.*(q|v)"},
        {"target_modules": r"decoder"},  # a pattern is one of whole names
        {"exclude_modules": ["SelfAttention.q"]},
        {"exclude_modules": r"decoder.*"},
        {"layers_to_transform": 2},
        {"layers_to_transform": [0, 2], "layers_pattern": "block"},
        {"layers_to_transform": [1], "layers_pattern": ["h", "layer"]},
        {"layers_to_transform": []},
        {"layers_to_transform": [0], "layers_pattern": ""},
        {"layers_to_transform": [0], "layers_pattern": "(?P<block>block)"},
        # A layer's whole name counts in whatever block it is.
        {"target_modules": ["q", CROSS[3]], "layers_to_transform": [0]},
        {"target_modules": ["lm_head", "q"], "layers_to_transform": [0]},
        # A pattern of whole names is taken as it is.
        {"target_modules": r"(?i)DECODER.*ATT.*\.(q|V)"},
        {"target_modules": "(?x) .* \\. q  # all"},
        {"exclude_modules": r"(?i)DECODER.*"},
    ],
)
def test_targets_are_those_of_peft(entries):
    theirs = LoraOfPeft(**{"target_modules": ["q"], **entries})
    expected = [layer for layer in LAYERS if check_target_module_exists(theirs, layer)]
    assert list(read(**entries).changes(LAYERS)) == expected


def test_targets_without_names():
    all_linear = read(target_modules="All-Linear").changes(LAYERS)
    assert list(all_linear) == [layer for layer in LAYERS if "." in layer]
    assert read(target_modules=None) == read(target_modules=["q", "v"])  # PEFT's for T5


def test_ranks_and_scales():
    """The first pattern counts that is the end of a name, from a dot on."""
    config = read(
        r=4,
        lora_alpha=2,
        target_modules=["q", "v"],
        rank_pattern={"EncDecAttention.q": 2, r"block\.[12]\..*": 16, "q": 8, "uter": 1},
        alpha_pattern={"v": 64, r"encoder.*": 1.5},
    )
    changes = config.changes(LAYERS)
    assert [changes[layer].rank for layer in ENCODER] == [8, 4, 16, 16, 16, 16]
    assert [changes[layer].rank for layer in CROSS] == [2, 4, 2, 16, 2, 16]
    assert [changes[layer].scale for layer in ENCODER[:3]] == [1.5 / 8, 64 / 4, 1.5 / 16]
    assert changes[CROSS[0]].scale == 2 / 2
    rooted = read(r=3, lora_alpha=5, use_rslora=True)
    assert rooted.changes(["q"]) == {"q": Change(3, 5 / math.sqrt(3))}
    usual = LoraConfig.from_dict({"peft_type": "LORA", "target_modules": ["q"]})
    assert usual.changes(["q"]) == {"q": Change(8, 1.0)}


def test_what_peft_writes_beside_is_no_obstacle():
    neutral = {
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "ensure_weight_tying": True,
        "inference_mode": True,
        "lora_dropout": 0.1,
        "loftq_config": {"loftq_bits": 4},
        "auto_mapping": {"base_model_class": "T5ForConditionalGeneration"},
        "init_lora_weights": "eva",
        "bias": "lora_only",
        "fan_in_fan_out": True,
        "modules_to_save": [],
        "use_dora": False,
        "a_size_of_tomorrow": 7,
    }
    assert read(**neutral) == read()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3 cannot be merged; only LORA can"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type PROMPT_TUNING"),
        ({"peft_type": None, "fine_tune_type": "lora"}, "no peft_type; only adapters saved by"),
        ({"bias": True}, "bias is True; it must be none, lora_only or all"),
        ({"a_variant_of_tomorrow": {"rank": 2}}, "a_variant_of_tomorrow .* here; merge it with"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16 changes the base model"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "loftq cannot be merged here: it may change the base"),
        ({"init_lora_weights": "best"}, "init_lora_weights best cannot be merged here"),
        (
            {"target_modules": ".*q", "layers_to_transform": 0},
            "transform goes with a list of",
        ),
        ({"layers_pattern": "block"}, "layers_pattern goes with layers_to_transform only"),
        ({"r": 0}, "r is 0; it must be a whole number from 1"),
        ({"r": 2.0}, "r is 2.0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "16"}, "lora_alpha is .*; it must be a number"),
        ({"lora_alpha": math.nan}, "lora_alpha is .*; it must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is .*; it must be a number"),
        ({"use_rslora": 1}, "use_rslora is 1; it must be True or False"),
        ({"rank_pattern": ["q"]}, "rank_pattern is .* must be an object"),
        ({"rank_pattern": {"q": -1}}, "rank_pattern is -1; it must be a whole number"),
        ({"alpha_pattern": {"q": "2"}}, "alpha_pattern is '2'; it must be a number"),
        ({"alpha_pattern": {"q" * 1001: 1}}, "at most 1000 characters"),
        ({"target_modules": ["q", 5]}, "target_modules is .* must be a list"),
        ({"target_modules": ["q"] * 5000}, "target_modules is .* a list of at most 4096"),
        ({"layers_to_transform": ["0"]}, "transform is .* must be a list .* whole numbers"),
    ],
)
def test_refused_by_name(entries, message):
    with pytest.raises(UserError, match=message):
        read(**entries)


def test_a_file_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read .*; give the folder of a PEFT adapter"):
        LoraConfig.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([PLAIN]))
    with pytest.raises(UserError, match="holds no object"):
        LoraConfig.read(tmp_path)


@pytest.mark.parametrize("pattern", ["(", "*", r"(?P<", "a{" + "9" * 30 + "}"])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(UserError, match="no regular expression|patterns take"):
        read(target_modules=pattern).changes(LAYERS)


@pytest.mark.parametrize("name", ["rank_pattern", "layers_pattern"])
def test_flags_are_refused_where_peft_puts_something_in_front(name):
    entries = {
        "layers_to_transform": [0],
        name: {"(?i)Q": 2} if name == "rank_pattern" else "(?i)Q",
    }
    with pytest.raises(UserError, match=r": \(\?i\)Q is no regular expression behind a name"):
        read(**entries).changes(LAYERS)


def test_patterns_that_would_take_years_are_refused():
    with pytest.raises(UserError, match="patterns take more than 0.3 s"):
        matches([(WHOLE, r"((([a-zA-Z.])+)+)+!")], LAYERS, seconds=0.3)
