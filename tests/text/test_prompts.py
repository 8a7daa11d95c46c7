"""Tests good and bad prompts and settings from callers."""

import re

import numpy as np
import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from decoder import SpeculativeDecoder
from fake_model import FakeModel, greedy, random_table
from mlx_t5 import loading as pair
from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.sampling import draws
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


def test_exact_is_true_or_false():
    with pytest.raises(UserError, match="exact is 'no'; it must be True or False"):
        SpeculativeDecoder(target(), exact="no")


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


@pytest.mark.parametrize("alone", ["\ud800", None])
def test_streaming_a_bad_prompt_is_an_error(alone):
    with pytest.raises(UserError, match="a prompt is"):
        SpeculativeDecoder(target()).stream(alone)


@pytest.mark.parametrize("seed", [None, 1.5, "1", -1, [1]])
def test_a_stream_has_one_seed(seed):
    with pytest.raises(UserError, match="^seed is .*; it must be a whole number"):
        SpeculativeDecoder(target()).stream(SOURCE, seed=seed)


@pytest.mark.parametrize("several", ["text", None, 5, {"prompt": "text"}])
def test_results_takes_several_prompts(several):
    with pytest.raises(UserError, match="^prompts is .*; it must be a list"):
        SpeculativeDecoder(target()).results(several)


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


def test_any_number_of_samples_begins_at_once(monkeypatch):
    calls, row_key = [], draws.row_key
    monkeypatch.setattr(draws, "row_key", lambda *words: calls.append(words) or row_key(*words))
    decoder, options = SpeculativeDecoder(target()), {"max_tokens": 4, "temp": 1.0}
    for samples in (5_000, 10**9, 10**30):
        calls.clear()
        job = decoder.job(num_samples=samples, **options)
        results = decoder.results([SOURCE, SOURCE], job, 2)
        assert next(results).finish_reason and next(results).finish_reason
        assert len(calls) < 40


def test_prompts_are_drawn_as_they_are_needed():
    drawn = []

    def endless():
        while True:
            drawn.append(len(drawn))
            yield SOURCE

    decoder = SpeculativeDecoder(target())
    results = decoder.results(endless(), decoder.job(max_tokens=2), 2)
    for _ in range(50):
        next(results)
    assert 50 <= len(drawn) < 80


class Pieces:
    """A tokenizer that, like sentencepiece, splits into words with the space before them."""

    def __init__(self):
        self.pieces = ["</s>"]

    def encode(self, text):
        split = re.findall(r"▁?[^▁:]+|▁?:|▁", "▁" + text.replace(" ", "▁"))
        self.pieces += [piece for piece in split if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in split] + [0]

    def convert_ids_to_tokens(self, token):
        return self.pieces[token]

    def decode(self, tokens, **_):
        return "".join(self.pieces[token] for token in tokens if token).replace("▁", " ")


BYTE_LEVEL = PreTrainedTokenizerFast(tokenizer_object=byte_level([]))
TOKENIZERS = [Pieces(), ByT5Tokenizer()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["pieces", "bytes"])
@pytest.mark.parametrize(
    "prefix",
    [
        "translate English to German:",
        "translate English to Simplified Chinese:",
        "summarize:",
        "cola sentence:",
        "stsb sentence1:",
        "mnli hypothesis:",
        "question:",
        "grammar:",
        "Fix grammatical errors in this sentence:",
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
        "She said: the house is small.",
        "Call me at 10: I am at home.",
        "call me at 10: i am at home.",
        "come at 10:30 to the station.",
        "see https://example.org for it.",
        "it rained. we went: all of us.",
        "Dear Sir: thank you for the letter.",
        "the house that stands at the end of the long street is old and empty: nobody lives.",
        "no colon at all",
        "summarize:",
        ": she",
        "",
    ],
)
def test_text_without_a_task_has_no_prefix(text, tokenizer):
    assert task_prefix(tokenizer.encode(text), tokenizer) == ()


def test_the_bundled_models_prefixes_are_found():
    """An id that the tokenizer does not have is ignored."""
    tokenizer = load_tokenizer(pair.BUNDLED / "target")
    ids = tokenizer.encode("fix grammar: He go.")
    prefix = tuple(tokenizer.encode("fix grammar:")[:-1])
    assert task_prefix(ids, tokenizer) == prefix
    assert task_prefix([10**6, *ids], tokenizer) == (10**6, *prefix)
