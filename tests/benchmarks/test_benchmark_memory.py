"""`memory`: the public models' shapes against their published numbers of parameters."""

import pytest

import benchmark
from benchmarks.memory import MODELS, draft_of, need, together

# As the Hub counts the tensors of the published safetensors files, or the papers say.
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "madlad400-3b-mt": 2_940_374_016,
    "byt5-small": 299_637_760,
}


@pytest.fixture(scope="module")
def needs():
    return {name: need(config, 512, 512) for name, config in MODELS.items()}


def test_shapes_are_those_of_the_published_models(needs):
    assert {name: size.parameters for name, size in needs.items()} == PUBLISHED


def test_what_a_model_takes(needs):
    size = needs["t5-11b"]
    assert size.weights[None] == 2 * PUBLISHED["t5-11b"]
    # 4 bits and a scale and an offset of 2 bytes for every 64; the embedding stays as it is.
    embedding = 2 * 32128 * 1024
    quantised = 4.5 / 16 * (size.weights[None] - embedding)
    assert size.weights[4] == pytest.approx(quantised + embedding, rel=1e-3)
    # 24 layers, keys and values, 128 heads of 128, 2 bytes, source and text.
    assert size.prompt > 24 * 2 * 128 * 128 * 2 * 1024


def test_a_target_is_counted_with_its_draft_and_a_prompt_in_both(needs):
    drafts = [draft_of(name) for name in ("flan-t5-xl", "t5-small", "byt5-small")]
    assert drafts == ["flan-t5-small", None, None]
    large, small = needs["t5-large"], needs["t5-small"]
    others = large.prompt + small.weights[None] + small.prompt
    assert together("t5-large", needs) == {b: w + others for b, w in large.weights.items()}
    byt5 = needs["byt5-small"]
    assert together("byt5-small", needs)[8] == byt5.weights[8] + byt5.prompt


def test_the_table(capsys):
    assert benchmark.main(["memory", "--source", "100"]) == 0
    out = capsys.readouterr().out
    assert "a prompt of 100 tokens and a text of 512" in out
    assert len([line for line in out.splitlines() if line.startswith("| ")]) == 2 + len(MODELS)
    assert "| t5-11b | 11,307 M | 22.61 GB |" in out
