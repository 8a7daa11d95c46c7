"""Beams in the engine: beside other rows, on fake models and on a real network."""

import numpy as np
import pytest

from decoder import Engine, SpeculativeDecoder
from fake_model import EOS, FakeModel, drafter, good, random_table
from families import SHAPE
from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config
from mlx_t5.requests import Row, Settings
from mlx_t5.sampling.draws import row_key
from model import T5

V = 11
TABLE = random_table(V, eos_bias=-1.0)
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3], [7, 2]]
# Greedy, beams, sampled, more beams than the others, greedy with rules.
WISHES = [
    {"num_draft": 3},
    {"num_beams": 3, "num_return_sequences": 2},
    {"temp": 1.0, "num_draft": 2},
    {"num_beams": 5, "length_penalty": 2.0, "repetition_penalty": 1.5},
    {"num_draft": 4, "no_repeat_ngram_size": 1},
]


def rows(max_tokens=9):
    wishes = zip(SOURCES, WISHES, strict=True)
    return [
        Row(list(source), Settings(max_tokens, **wish), row_key(0, i))
        for i, (source, wish) in enumerate(wishes)
    ]


def outcome(row):
    beams = row.search.texts if row.search else []
    return row.output()[0], row.finish_reason, [(b.tokens, float(b.score)) for b in beams]


def engine_of(model):
    return Engine(model, drafter(good(model.table), model))


def test_a_row_is_the_same_beside_others_and_alone():
    expected = []
    for row in rows():
        engine = engine_of(FakeModel(TABLE, V))
        engine.insert([row])
        while engine.rows:
            engine.step()
        expected.append(outcome(row))
    together, engine = rows(), engine_of(FakeModel(TABLE, V))
    for row in together:  # one joins before each step
        engine.insert([row])
        engine.step()
    while engine.rows:
        engine.step()
    assert [outcome(row) for row in together] == expected


def test_the_cache_holds_each_beam_but_its_last_token():
    engine = engine_of(FakeModel(TABLE, V))
    engine.insert(rows(max_tokens=12))
    steps = 0
    while engine.rows:
        engine.step()
        steps += 1
        lanes = [tokens for row in engine.rows for tokens in row.lanes]
        if lanes:
            assert [s[: len(t) - 1] for s, t in zip(engine.cache.slots, lanes, strict=True)] == [
                tokens[:-1] for tokens in lanes
            ]
    assert steps == 12


def test_a_step_is_one_pass_and_waits_once(monkeypatch):
    mx.random.seed(0)
    model = T5(T5Config.from_dict({"model_type": "t5", **SHAPE}))
    engine, waits = Engine(model, None), []
    engine.insert(rows())
    passes, decode, wait = [], model.decode, mx.eval
    monkeypatch.setattr(T5, "decode", lambda _, *a, **k: passes.append(1) or decode(*a, **k))
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(1) or wait(*arrays))
    for _ in range(3):
        engine.step()
    assert len(passes) == len(waits) == 3


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 3, 2], [4, 1, 1]])
def test_lanes_of_a_prompt_share_its_source(counts):
    mx.random.seed(1)
    model = T5(T5Config.from_dict({"model_type": "t5", **SHAPE}))
    rng = np.random.default_rng(0)
    ids = mx.array(rng.integers(3, 96, (3, 7)))
    mask = mx.arange(7) < mx.array([[7], [4], [6]])
    cache = model.cache(model.encode(ids, mask), mask)
    cache.fan_out(counts)
    owners = mx.array(np.repeat(np.arange(3), counts))
    tokens = mx.array(rng.integers(3, 96, (len(owners), 5)))
    expected = model(ids[owners], tokens, mask[owners])
    out = [model.decode(tokens[:, :2], cache, [0] * len(owners))]
    assert cache.cross_keys[0].shape[0] == 3 and cache.keys[0].shape[0] == len(owners)
    # Lanes change places within their prompt, and the first prompt leaves.
    swap = list(range(len(owners)))
    swap[counts[0] : counts[0] + counts[1]] = reversed(swap[counts[0] : counts[0] + counts[1]])
    cache.reorder(swap)
    cache.keep([1, 2])
    left = mx.array(swap[counts[0] :])
    out.append(model.decode(tokens[left, 2:], cache, [2] * len(left.tolist())))
    np.testing.assert_allclose(out[0], expected[:, :2], atol=1e-4)
    np.testing.assert_allclose(out[1], expected[left, 2:], atol=1e-4)


def test_results_are_those_of_the_first_prompt_then_those_of_the_second():
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
        assert all(set(r.writers) <= {"target"} and len(r.writers) == len(r.tokens) for r in three)
    assert decoder.generate(SOURCES[0], max_tokens=3).score is None


def test_what_rules_leave_no_room_for_is_an_error_of_that_result():
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


def test_logits_that_are_no_numbers_end_the_row_alone():
    def broken(source, seen):
        return np.full(V, np.nan, np.float32) if source == (5,) else TABLE(source, seen)

    results = SpeculativeDecoder(FakeModel(broken, V)).generate(SOURCES[:3], num_beams=2)
    assert [r.finish_reason == "error" for r in results] == [True, False, False]


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"temp": 0.7}, "num_beams is 4 and temp 0.7: beams do not sample"),
        ({"delta": 0.5}, "num_beams is 4 and delta 0.5: nothing is drafted"),
        ({"num_return_sequences": 5}, "num_return_sequences is 5 and num_beams is 4"),
    ],
)
def test_what_does_not_go_with_beams_is_refused(wishes, told):
    with pytest.raises(UserError, match=told):
        Settings(num_beams=4, **wishes)


def test_beams_are_not_streamed():
    with pytest.raises(UserError, match="known at the end only"):
        SpeculativeDecoder(FakeModel(TABLE, V)).stream(SOURCES[0], num_beams=2)


WORDS = ["", "", "a", "b", "ab", "bc", "c", "abc", " ", "d.", "e"]


class Words:
    """A tokenizer whose tokens are the entries of WORDS."""

    def decode(self, tokens, **_):
        return "".join(WORDS[token] for token in tokens)

    def convert_ids_to_tokens(self, token):
        return WORDS[token]


def test_a_stop_string_ends_a_hypothesis_as_an_end_token_does():
    options = {"max_tokens": 10, "num_beams": 4, "num_return_sequences": 4}
    stopping = SpeculativeDecoder(FakeModel(TABLE, V), None, Words())
    ending = SpeculativeDecoder(FakeModel(TABLE, V, more_eos_token_ids=(9,)))
    (full_stop,) = [i for i, word in enumerate(WORDS) if "." in word]
    found = stopping.generate(SOURCES, stop=".", **options)
    for ours, theirs in zip(found, ending.generate(SOURCES, **options), strict=True):
        stopped = full_stop in ours.tokens
        assert ours.tokens[: len(ours.tokens) - stopped] == theirs.tokens
        assert (ours.score, ours.finish_reason) == (theirs.score, theirs.finish_reason)
        assert ours.text == Words().decode(theirs.tokens) + "d" * stopped
    assert any(full_stop in result.tokens for result in found)


def test_a_stop_string_across_tokens_is_seen_in_every_hypothesis():
    options = {"max_tokens": 10, "num_beams": 4, "num_return_sequences": 4, "min_tokens": 4}
    found = SpeculativeDecoder(FakeModel(TABLE, V), None, Words()).generate(
        SOURCES, stop=["ab", "ca"], **options
    )
    whole = [Words().decode(result.tokens) for result in found]
    cut = [min((w.find(s) for s in ("ab", "ca") if s in w), default=len(w)) for w in whole]
    assert [result.text for result in found] == [w[:c] for w, c in zip(whole, cut, strict=True)]
    assert sum(c < len(w) for w, c in zip(whole, cut, strict=True)) > 3
    for result, text in zip(found, whole, strict=True):
        before = Words().decode(result.tokens[:-1])
        assert not any(stop in before for stop in ("ab", "ca")), text
