"""Tests good and bad prompts and settings from callers."""

from itertools import repeat

import numpy as np
import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from fake_model import FakeModel, greedy, random_table
from mlx_t5 import loading as pair
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.text.prompts import task_prefix
from mlx_t5.text.tokenizer import load_tokenizer
from tokenizer_folders import byte_level

V = 7
TABLE = random_table(V)
SOURCE = [2, 3, 4, 5, 6, 2]


def target():
    return FakeModel(TABLE, V)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_samples": 2}, "num_samples requires temp above 0"),
        ({"seed": [1, 2, 3]}, "3 seeds for 1 prompts"),
        ({"prompts": "  "}, "a prompt is empty"),
        ({"prompts": "text"}, "tokenizer"),
        ({"prompts": [3, True]}, "token id True is no whole number"),
        ({"prompts": None}, "prompts is None; it must be a text or a list of token ids, or a list"),
        ({"prompts": 5}, "prompts is 5; it must be"),
        ({"prompts": {"prompt": "text"}}, "prompts is {'prompt': 'text'}; it must be"),
        ({"seed": [1, 2.5]}, "seed is 2.5"),
        ({"seed": [None]}, "seed is None"),
    ],
)
def test_bad_arguments_are_refused(arguments, complaint):
    arguments = {"prompts": SOURCE, **arguments}
    with pytest.raises(UserError, match=complaint):
        SpeculativeDecoder(target()).generate(**arguments)


MASK = "it must be a list of 0 and 1, one a token id"
BAD_MASKS = [
    ([1] * 5, "attention_mask has 5 numbers for 6 token ids"),
    ([0] * 6, "attention_mask hides every token of a prompt"),
    ([1, 2, 1, 1, 1, 1], f"attention_mask is [1, 2, 1, 1, 1, 1]; {MASK}"),
    ([[1] * 6], f"attention_mask is [[1, 1, 1, 1, 1, 1]]; {MASK}"),
    ([np.ones(2), 1, 1, 1, 1, 1], "attention_mask is [array("),
    (1, f"attention_mask is 1; {MASK}"),
    ("111111", f"attention_mask is '111111'; {MASK}"),
]


@pytest.mark.parametrize(("mask", "complaint"), BAD_MASKS)
def test_a_bad_mask_is_refused_and_fails_alone_in_a_list(mask, complaint):
    decoder = SpeculativeDecoder(target())
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(UserError) as error:
            call(SOURCE, attention_mask=mask)
        assert str(error.value).startswith(complaint)
    bad, fine = decoder.generate([SOURCE, SOURCE], max_tokens=5, attention_mask=[mask, None])
    assert bad.error.startswith(complaint) and fine.tokens == greedy(decoder.model, SOURCE, 5)[0]
    with pytest.raises(UserError, match="attention_mask is .*; it must be a list of 2"):
        decoder.generate([SOURCE, SOURCE], attention_mask=[[1] * 6])


@pytest.mark.parametrize("options", [{}, {"split": "sentences"}])
def test_a_text_has_no_mask(options, decoder):
    cause = "attention_mask (needs token ids, not a text|cannot be combined with split)"
    with pytest.raises(UserError, match=cause):
        decoder.generate("fix grammar: He go.", attention_mask=[1], **options)


def test_no_prompts_give_no_results():
    assert SpeculativeDecoder(target()).generate([]) == []


BAD_PROMPTS = [
    ([], "a prompt is empty"),
    ([V], f"token id {V} is outside"),
    (ValueError("could not be read"), "could not be read"),
    ("half \ud800 a pair", "a prompt is not valid Unicode (character 6 is half of a pair)"),
    (None, "a prompt is None; it must be a text or a list of token ids"),
    (5, "a prompt is 5; it must be"),
    (b"text", "a prompt is b'text'; it must be"),
    ({"prompt": "text"}, "a prompt is {'prompt': 'text'}; it must be"),
    ([2.0, 3], "token id 2.0 is no whole number"),
    (["2", 3], "token id '2' is no whole number"),
    ([2, [3]], "token id [3] is no whole number"),
    (np.array([2.0]), "token id 2.0 is no whole number"),
    ([2, 10**5000], "token id too large an int"),
    ([-(10**20)], "token id -100000000000000000000 is outside"),
]


def test_a_bad_prompt_fails_alone():
    model = target()
    prompts = [prompt for bad, _ in BAD_PROMPTS for prompt in (bad, SOURCE)]
    results = SpeculativeDecoder(model).generate(prompts[:1] + prompts, max_tokens=5)
    for (_, complaint), bad, fine in zip(BAD_PROMPTS, results[1::2], results[2::2], strict=True):
        assert (bad.finish_reason, bad.tokens, bad.text) == ("error", [], None)
        assert bad.error.startswith(complaint) and bad.error.isprintable()
        assert (fine.tokens, fine.finish_reason) == greedy(model, SOURCE, 5)


@pytest.mark.parametrize("arguments", [("\ud800",), (None,), (SOURCE, [1]), (SOURCE, -1)])
def test_a_stream_has_one_prompt_and_one_seed(arguments):
    prompt, *seed = arguments
    with pytest.raises(UserError, match="^(a prompt|seed) is "):
        SpeculativeDecoder(target()).stream(prompt, **({"seed": seed[0]} if seed else {}))


@pytest.mark.parametrize(
    "prompts",
    [
        lambda: (prompt for prompt in [SOURCE, SOURCE[:2]]),
        lambda: iter([tuple(SOURCE), np.array(SOURCE[:2], np.uint8)]),
        lambda: [list(np.array(SOURCE)), SOURCE[:2]],
        lambda: [mx.array(SOURCE), (token for token in SOURCE[:2])],
    ],
)
def test_prompts_may_be_any_iterable_of_any_iterables(prompts):
    model = target()
    results = SpeculativeDecoder(model).generate(prompts(), max_tokens=5)
    assert [r.tokens for r in results] == [greedy(model, s, 5)[0] for s in (SOURCE, SOURCE[:2])]


def test_a_seed_may_be_given_for_each_prompt_in_any_form():
    decoder, options = SpeculativeDecoder(target()), {"max_tokens": 9, "temp": 1.0}
    expected = [r.tokens for r in decoder.generate([SOURCE] * 3, seed=[4, 5, 6], **options)]
    for seeds in (np.array([4, 5, 6]), iter([np.int32(4), 5, 6]), mx.array([4, 5, 6]), range(4, 7)):
        results = decoder.generate([SOURCE] * 3, seed=seeds, **options)
        assert [r.tokens for r in results] == expected


def test_prompts_and_samples_without_an_end_begin_at_once():
    decoder = SpeculativeDecoder(target())
    request = decoder.request(max_tokens=4, temp=1.0, num_samples=10**30)
    assert next(decoder.results([SOURCE, SOURCE], request, 2)).finish_reason
    results = decoder.results(repeat(SOURCE), decoder.request(max_tokens=2), 2)
    assert [next(results).finish_reason for _ in range(50)] == ["length"] * 50


BYTE_LEVEL = PreTrainedTokenizerFast(tokenizer_object=byte_level([]))
TOKENIZERS = [load_tokenizer(pair.BUNDLED / "target"), ByT5Tokenizer()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["pieces", "bytes"])
@pytest.mark.parametrize(
    "prefix",
    [
        "translate English to Simplified Chinese:",
        "summarize:",
        "stsb sentence1:",
        "Remove all grammatical errors from this text:",
        "Paraphrase this:",
    ],
)
def test_the_prefix_of_a_task_is_found(prefix, tokenizer):
    ids = tokenizer.encode(prefix + " She said: the house is small.")
    length = len(tokenizer.encode(prefix)) - 1
    assert task_prefix(ids, tokenizer) == tuple(ids[:length])
    assert task_prefix(ids, None) == ()
    ids, colon = BYTE_LEVEL.encode(prefix + " She said: the house."), BYTE_LEVEL.encode(":")[0]
    assert task_prefix(ids, BYTE_LEVEL) == tuple(ids[: ids.index(colon) + 1])


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["pieces", "bytes"])
@pytest.mark.parametrize(
    "text",
    [
        "Call me: I am at home.",
        "call me at 10: i am at home.",
        "see https://example.org for it.",
        "it rained. we went: all of us.",
        "the house that stands at the end of the long street is old and empty: nobody lives.",
        "summarize:",
        ": she",
        "",
    ],
)
def test_text_without_a_task_has_no_prefix(text, tokenizer):
    assert task_prefix(tokenizer.encode(text), tokenizer) == ()


def test_an_id_without_a_token_may_stand_in_a_prefix():
    ids = TOKENIZERS[0].encode("fix grammar:")[:-1]
    assert task_prefix([10**6, *ids, *ids], TOKENIZERS[0]) == (10**6, *ids)
