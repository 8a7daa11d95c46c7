"""Tests config.json as saved by publishers and transformers 5, and hostile contents."""

import pytest
import transformers

from families import SHAPE
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.errors import UserError

RAW = {"model_type": "t5", **SHAPE}


def test_absent_entries_have_their_defaults():
    config = T5Config.from_dict({k: v for k, v in RAW.items() if not k.startswith(("rel", "eos"))})
    assert config.relative_attention_num_buckets == 32
    assert config.relative_attention_max_distance == 128
    assert (config.feed_forward_proj, config.dense_act_fn) == ("relu", "relu")
    assert config.eos_token_id == 1
    assert T5Config.from_dict({**RAW, "num_decoder_layers": None}).num_decoder_layers == 2


@pytest.mark.parametrize("entries", [
    {}, {"feed_forward_proj": "gelu"}, {"feed_forward_proj": "gated-gelu"},
    {"is_gated_act": True}, {"is_gated_act": True, "dense_act_fn": "gelu_new"},
    {"feed_forward_proj": "gated-silu", "is_gated_act": False},
    {"model_type": "mt5"}, {"model_type": "umt5", "is_gated_act": True},
], ids=str)  # fmt: skip
def test_the_feed_forward_is_that_of_transformers(entries):
    raw = {**RAW, **entries}
    hf_config = transformers.AutoConfig.for_model(**raw)
    config = T5Config.from_dict(raw)
    assert config.is_gated_act == hf_config.is_gated_act
    assert config.dense_act_fn == hf_config.dense_act_fn


def test_activation_as_saved_wins():
    raw = {**RAW, "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}
    assert T5Config.from_dict(raw).dense_act_fn == "gelu"


@pytest.mark.parametrize(
    ("entries", "scaled"),
    [
        ({}, True),
        ({"tie_word_embeddings": None}, True),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        # transformers 5 writes true for every model, and the real value beside it
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"tie_word_embeddings": True, "model_type": "mt5"}, False),
        ({"model_type": "mt5"}, False),
        ({"tie_word_embeddings": False, "model_type": "umt5"}, False),
    ],
)
def test_config_json_decides_whether_logits_are_scaled(entries, scaled):
    assert T5Config.from_dict({**RAW, **entries}).scales_logits is scaled


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("ChronosBoltModelForForecasting", "Chronos-Bolt"), ("Chronos2Model", "Chronos-2")],
)
def test_other_models_that_forecast_are_refused_by_name(architecture, name):
    for raw in (RAW, {"model_type": "t5", "vocab_size": 2}):  # Chronos-2 lacks entries of a T5, too
        raw = raw | {"architectures": [architecture]}
        with pytest.raises(UserError, match=f"this model is {name}, of another architecture"):
            T5Config.from_dict(raw)
    for harmless in (None, "Chronos2Model", [["Chronos2Model"]], ["T5ForConditionalGeneration"]):
        assert T5Config.from_dict({**RAW, "architectures": harmless}).vocab_size == 96


def test_special_tokens_are_read_in_every_form():
    assert T5Config.from_dict({**RAW, "eos_token_id": 7}).eos_token_ids == (7,)
    assert T5Config.from_dict({**RAW, "eos_token_id": [7]}).eos_token_ids == (7,)
    several = T5Config.from_dict({**RAW, "eos_token_id": [7, 3, 7], "more_eos_token_ids": [5]})
    assert (several.eos_token_id, several.eos_token_ids) == (7, (7, 3))
    raw = {**RAW, "pad_token_id": 5, "decoder_start_token_id": None}
    assert T5Config.from_dict(raw).decoder_start_token_id == 5


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"model_type": "bert"}, "'bert'"),
        ({"d_model": None}, "no d_model"),
        ({"d_model": 512.0}, "d_model"),
        ({"d_kv": True}, "d_kv"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_layers": 257}, "layers"),
        ({"num_heads": 2**13, "d_kv": 2**12}, "num_heads times d_kv"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
        ({"feed_forward_proj": "gated-mish"}, "'mish'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, 96]}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"decoder_start_token_id": 1.5}, "decoder_start_token_id"),
    ],
)
def test_unsupported_configs_are_refused(entries, named):
    with pytest.raises(UserError, match=named) as error:
        T5Config.from_dict({**RAW, **entries})
    assert "\n" not in str(error.value)
