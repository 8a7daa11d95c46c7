"""Prompts and settings as callers give them, good and bad."""

import re

import numpy as np
import pytest
from transformers import ByT5Tokenizer

import pair
from backend import UserError
from decoder import SpeculativeDecoder
from fake_model import FakeModel, greedy, random_table
from prompts import task_prefix
from text import load_tokenizer

V = 7
TABLE = random_table(V)
SOURCE = [2, 3, 4, 5, 6, 2]


def target():
    return FakeModel(TABLE, V)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temp": -0.1}, "temp is -0.1"),
        ({"temp": float("nan")}, "temp is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 2}, "all 2 samples would be equal; raise temp"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": [1, 2, 3]}, "3 seeds for 1 prompts"),
        ({"prompts": []}, None),
        ({"prompts": "  "}, "a prompt is empty"),
        ({"prompts": "text"}, "tokenizer"),
        ({"prompts": [V]}, f"token id {V} is outside"),
        ({"prompts": [-1]}, "token id -1 is outside"),
    ],
)
def test_bad_arguments(arguments, complaint):
    arguments = {"prompts": SOURCE, **arguments}
    decoder = SpeculativeDecoder(target())
    if complaint is None:
        assert decoder.generate(**arguments) == []
        return
    with pytest.raises(UserError, match=complaint):
        decoder.generate(**arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_draft": 0}, "num_draft is 0"),
        ({"delta": -0.1}, "delta is -0.1"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"delta": float("nan")}, "delta is nan"),
    ],
)
def test_bad_construction(arguments, complaint):
    with pytest.raises(UserError, match=complaint):
        SpeculativeDecoder(target(), **arguments)


def test_a_bad_prompt_among_several_is_reported_and_the_others_finish():
    model = target()
    prompts = [SOURCE, [], SOURCE[:1], [V], ValueError("could not be read")]
    results = SpeculativeDecoder(model).generate(prompts, max_tokens=5)
    assert (results[0].tokens, results[0].finish_reason) == greedy(model, SOURCE, 5)
    assert (results[2].tokens, results[2].finish_reason) == greedy(model, SOURCE[:1], 5)
    errors = [results[i].error for i in (1, 3, 4)]
    assert errors[0].startswith("a prompt is empty")
    assert errors[1].startswith(f"token id {V} is outside")
    assert errors[2] == "could not be read"
    assert {results[i].finish_reason for i in (1, 3, 4)} == {"error"}


def test_prompts_are_drawn_as_they_are_needed():
    drawn = []

    def endless():
        while True:
            drawn.append(len(drawn))
            yield SOURCE

    results = SpeculativeDecoder(target()).results(endless(), max_tokens=2, batch_size=2)
    for _ in range(50):
        next(results)
    assert 50 <= len(drawn) < 80


class Pieces:
    """A tokenizer that splits a text as sentencepiece does: words with the space before them."""

    def __init__(self):
        self.pieces = ["</s>"]

    def encode(self, text):
        split = re.findall(r"▁?[^▁:]+|▁?:|▁", "▁" + text.replace(" ", "▁"))
        self.pieces += [piece for piece in split if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in split] + [0]

    def convert_ids_to_tokens(self, token):
        return self.pieces[token]


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
def test_task_prefixes(prefix, tokenizer):
    ids = tokenizer.encode(prefix + " She said: the house is small.")
    length = len(tokenizer.encode(prefix)) - 1
    assert task_prefix(ids, tokenizer) == tuple(ids[:length])
    assert task_prefix(ids, None) == ()


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
def test_no_task_prefixes(text, tokenizer):
    assert task_prefix(tokenizer.encode(text), tokenizer) == ()


def test_the_bundled_models_prefixes():
    """An id that the tokenizer does not have is passed over."""
    tokenizer = load_tokenizer(pair.BUNDLED / "target")
    ids = tokenizer.encode("fix grammar: He go.")
    prefix = tuple(tokenizer.encode("fix grammar:")[:-1])
    assert task_prefix(ids, tokenizer) == prefix
    assert task_prefix([10**6, *ids], tokenizer) == (10**6, *prefix)


def test_prompts_may_be_numpy_integers():
    model = target()
    result = SpeculativeDecoder(model).generate(list(np.array(SOURCE)), max_tokens=5)
    assert (result.tokens, result.finish_reason) == greedy(model, SOURCE, 5)
