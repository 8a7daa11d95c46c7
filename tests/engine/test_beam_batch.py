"""Tests several beam searches in one batch, on fake models and on a real network."""

import numpy as np
import pytest

from fake_model import EOS, FakeModel, random_table
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.beams import Beams
from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings
from words import Words

V = 11
TABLE = random_table(V, eos_bias=-1.0)
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3], [7, 2]]
WISHES = [
    {},
    {"num_return_sequences": 2},
    {"length_penalty": 2.0, "repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 1, "early_stopping": True},
    {"early_stopping": "never", "min_tokens": 3},
]
K = 3


def rows(max_tokens=9):
    wishes = zip(SOURCES, WISHES, strict=True)
    return [
        Row(list(source), Settings(max_tokens, num_beams=K, **wish), row_key(0, i))
        for i, (source, wish) in enumerate(wishes)
    ]


def outcome(row):
    texts = [(text.tokens, float(text.score)) for text in row.search.texts]
    return row.output()[0], row.finish_reason, texts


def test_a_row_is_the_same_beside_others_and_alone():
    expected = []
    for row in rows():
        batch = Beams(FakeModel(TABLE, V), K)
        batch.insert([row])
        while batch.rows:
            batch.step()
        expected.append(outcome(row))
    together, batch = rows(), Beams(FakeModel(TABLE, V), K)
    for row in together:  # one row joins before each step
        batch.insert([row])
        batch.step()
    while batch.rows:
        batch.step()
    assert [outcome(row) for row in together] == expected


def test_results_come_prompt_by_prompt():
    decoder = SpeculativeDecoder(FakeModel(TABLE, V), None)
    options = {"max_tokens": 8, "num_beams": 4, "num_return_sequences": 3}
    together = decoder.generate([SOURCES[0], [], SOURCES[1]], **options)
    alone = [decoder.generate(source, **options) for source in SOURCES[:2]]
    assert [r.finish_reason for r in together[3:6]] == ["error"] * 3
    assert [r.tokens for r in together[:3] + together[6:]] == [r.tokens for r in sum(alone, [])]
    for three in alone:
        assert [r.score for r in three] == sorted((r.score for r in three), reverse=True)
        assert {r.stats.target_calls for r in three} == {three[0].stats.target_calls}
        assert [r.stats.generated_tokens for r in three] == [len(r.tokens) for r in three]
        assert all(set(r.origins) <= {"target"} and len(r.origins) == len(r.tokens) for r in three)
    assert decoder.generate(SOURCES[0], max_tokens=3).score is None


def test_a_text_that_the_rules_prevent_is_an_error_of_its_result():
    allowed = mx.where((mx.arange(V) == 4) | (mx.arange(V) == EOS), 0.0, -mx.inf)
    decoder = SpeculativeDecoder(FakeModel(TABLE, V))
    options = {"logits_processors": [lambda tokens, logits: logits + allowed]}
    best, worse, none = decoder.generate(
        SOURCES[0], max_tokens=1, num_beams=3, num_return_sequences=3, **options
    )
    assert {tuple(best.tokens), tuple(worse.tokens)} == {(4,), ()} and best.score > worse.score
    assert none.finish_reason == "error" and "found 2 of 3 texts" in none.error
    forbid = [lambda tokens, logits: mx.full(logits.shape, -mx.inf)]
    with pytest.raises(UserError, match="after 0 tokens are NaN, infinite or all forbidden"):
        decoder.generate(SOURCES[0], num_beams=2, logits_processors=forbid)


def test_nan_logits_end_only_their_own_row():
    def broken(source, seen):
        return np.full(V, np.nan, np.float32) if source == (5,) else TABLE(source, seen)

    results = SpeculativeDecoder(FakeModel(broken, V)).generate(SOURCES[:3], num_beams=2)
    assert [r.finish_reason == "error" for r in results] == [True, False, False]


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"temp": 0.7}, "num_beams cannot be combined with temp"),
        ({"delta": 0.5}, "num_beams cannot be combined with delta"),
        (
            {"num_return_sequences": 5},
            "num_return_sequences is 5; it must be num_beams",
        ),
    ],
)
def test_settings_that_contradict_beams_are_refused(wishes, message):
    with pytest.raises(UserError, match=message):
        Settings(num_beams=4, **wishes)


def test_beams_are_not_streamed():
    with pytest.raises(UserError, match="known at the end only"):
        SpeculativeDecoder(FakeModel(TABLE, V)).stream(SOURCES[0], num_beams=2)


WORDS = ["", "", "a", "b", "ab", "bc", "c", "abc", " ", "d.", "e"]
TOKENIZER = Words(WORDS)


def test_a_stop_string_ends_a_hypothesis_as_an_end_token_does():
    options = {"max_tokens": 10, "num_beams": 4, "num_return_sequences": 4}
    stopping = SpeculativeDecoder(FakeModel(TABLE, V), None, TOKENIZER)
    ending = SpeculativeDecoder(FakeModel(TABLE, V, more_eos_token_ids=(9,)))
    (full_stop,) = [i for i, word in enumerate(WORDS) if "." in word]
    results = stopping.generate(SOURCES, stop=".", **options)
    for result, expected in zip(results, ending.generate(SOURCES, **options), strict=True):
        stopped = full_stop in result.tokens
        assert result.tokens[: len(result.tokens) - stopped] == expected.tokens
        assert (result.score, result.finish_reason) == (expected.score, expected.finish_reason)
        assert result.text == TOKENIZER.decode(expected.tokens) + "d" * stopped
    assert any(full_stop in result.tokens for result in results)


def test_a_stop_string_across_tokens_is_seen_in_every_hypothesis():
    options = {"max_tokens": 10, "num_beams": 4, "num_return_sequences": 4, "min_tokens": 4}
    results = SpeculativeDecoder(FakeModel(TABLE, V), None, TOKENIZER).generate(
        SOURCES, stop=["ab", "ca"], **options
    )
    whole = [TOKENIZER.decode(result.tokens) for result in results]
    cut = [min((w.find(s) for s in ("ab", "ca") if s in w), default=len(w)) for w in whole]
    assert [result.text for result in results] == [w[:c] for w, c in zip(whole, cut, strict=True)]
    assert sum(c < len(w) for w, c in zip(whole, cut, strict=True)) > 3
    for result, text in zip(results, whole, strict=True):
        before = TOKENIZER.decode(result.tokens[:-1])
        assert not any(stop in before for stop in ("ab", "ca")), text
