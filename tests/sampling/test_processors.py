"""Tests the rules against transformers, and in the engine against decoding by token."""

import numpy as np
import pytest

from draws import rules
from fake_model import EOS, START, FakeModel, always, drafter, random_table
from kinds import RULES
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.sampling.processors import History, penalize_repetition, repeats

torch = pytest.importorskip("torch")
from transformers import (  # noqa: E402
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

INF = float("inf")

# ---- each rule by itself -------------------------------------------------------------------------


def one_position(rule, tokens, logits, *options):
    """Applies a rule to one row and one position; returns a list of logits."""
    logits = mx.array(logits, mx.float32)[None, None]
    return rule(History.align([tokens]), logits, *options)[0, 0].tolist()


def test_a_token_already_written_is_divided_or_multiplied_once():
    logits = [2.0, -2.0, 2.0, -2.0, 0.0]
    penalized = one_position(penalize_repetition, [0, 1, 1, 4, 0], logits, mx.array([2.0]))
    assert penalized == [1.0, -4.0, 2.0, -2.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "n", "forbidden"),
    [
        ([0, 2, 3, 2], 2, {3}),
        ([0, 2, 3, 2, 4, 2], 2, {3, 4}),
        ([0, 2, 3], 2, set()),
        ([0, 2, 2], 2, {2}),
        ([0, 2, 3, 4, 2, 3], 3, {4}),
        ([0, 2, 3, 4, 5, 3], 3, set()),
        ([0, 2, 4], 1, {0, 2, 4}),
        ([0], 1, {0}),
        ([0], 2, set()),
        ([0, 3], 4, set()),
        ([0, 0], 2, {0}),
    ],
)
def test_an_n_gram_is_not_completed_twice(tokens, n, forbidden):
    marked = one_position(repeats, tokens, [0.0] * 6, n)
    assert {token for token, mark in enumerate(marked) if mark} == forbidden


@pytest.mark.parametrize("n", [6, 20_000, 2**31 - 1])
def test_an_n_gram_longer_than_the_text_forbids_nothing(n):
    logits, history = mx.zeros((2, 2, 5)), History.align([[0, 2, 3, 2, 3], [0]])
    assert rules(*[{"no_repeat_ngram_size": n}] * 2)(history, logits, [2, 2]) is logits


VOCAB = 11


def theirs(tokens, logits, options):
    """Applies transformers' processors, in their order, to one row."""
    made = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda words: NoBadWordsLogitsProcessor(words, EOS),
        "min_tokens": lambda least: MinNewTokensLengthLogitsProcessor(1, least, EOS),
        "forced_bos_token_id": ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda ids: ForcedEOSTokenLogitsProcessor(MOST + 1, ids),
        "suppress_tokens": SuppressTokensLogitsProcessor,
    }
    ids, scores = torch.tensor([tokens]), torch.tensor(logits)[None]
    for name, make in made.items():
        if options.get(name) is not None:
            scores = make(options[name])(ids, scores)
    return scores[0].numpy()


MOST = 9  # max_tokens
OPTIONS = [
    {"no_repeat_ngram_size": 3, "suppress_tokens": [4, 0]},
    {"repetition_penalty": 1.3, "min_tokens": 30, "forced_eos_token_id": [EOS, 7]},
    {"repetition_penalty": 0.7, "no_repeat_ngram_size": 2, "min_tokens": 5},
    {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "forced_bos_token_id": 3},
    {"no_repeat_ngram_size": 4, "min_tokens": 8, "bad_words_ids": [[EOS], [6], [0, 3], [1, 2, 4]]},
    {"bad_words_ids": [[2, 3], [START, 4]], "forced_bos_token_id": 4, "forced_eos_token_id": 4},
]


@pytest.mark.parametrize("seed", range(9))
def test_a_ragged_batch_of_blocks_is_processed_as_by_transformers(seed):
    draw = np.random.default_rng(seed)
    positions, lengths = int(draw.integers(1, 6)), draw.integers(1, 12, 6)
    committed = [[START, *draw.integers(0, 5, n - 1).tolist()] for n in lengths]
    drafts = draw.integers(0, 5, (6, positions - 1))
    logits = draw.normal(0, 3, (6, positions, VOCAB)).astype(np.float32)
    logits[draw.random(logits.shape) < 0.1] = -INF
    processing = rules(*(options | {"max_tokens": MOST} for options in OPTIONS))
    history = History.align(committed).then(mx.array(drafts, mx.int32) if positions > 1 else None)
    output = np.array(processing(history, mx.array(logits), [positions] * 6))
    for b, options in enumerate(OPTIONS):
        for t in range(positions):
            tokens = committed[b] + drafts[b, :t].tolist()
            expected = theirs(tokens, logits[b, t], options)
            np.testing.assert_allclose(output[b, t], expected, rtol=1e-6)


def test_no_end_token_comes_too_early():
    processing = rules({"min_tokens": 2}, eos=[1, 3])
    history = History.align([[0]]).then(mx.array([[4, 4]]))
    allowed = processing(history, mx.zeros((1, 3, 5)), [3]) == 0
    assert allowed.tolist() == [[[1, 0, 1, 0, 1], [1, 0, 1, 0, 1], [1] * 5]]


def test_no_rules_are_made_if_none_apply():
    assert rules({}, {"logits_processors": []}) is None
    for one in RULES.values():
        assert rules({}, one) is not None


# ---- callables -----------------------------------------------------------------------------------


def test_a_callable_sees_one_row_and_one_position():
    calls = []

    def watch(tokens, logits):
        calls.append((tokens.tolist(), logits.tolist()))
        return logits + 1

    logits = mx.arange(12).reshape(2, 2, 3).astype(mx.float32)
    history = History.align([[0, 4], [0, 5, 6]]).then(mx.array([[7], [8]]))
    processed = rules({"logits_processors": (watch,)}, {})(history, logits, [2, 2])
    assert calls == [([0, 4], [[0, 1, 2]]), ([0, 4, 7], [[3, 4, 5]])]
    assert processed.tolist() == [[[1, 2, 3], [4, 5, 6]], [[6, 7, 8], [9, 10, 11]]]


def test_callables_follow_the_rules_in_order_and_skip_padding():
    after = (lambda tokens, logits: logits + 1, lambda tokens, logits: logits * 10)
    processing = rules({"repetition_penalty": 2.0, "logits_processors": after})
    history = History.align([[0]]).then(mx.array([[0]]))
    assert processing(history, mx.full((1, 2, 2), 4.0), [1]).tolist() == [[[30, 50], [2, 4]]]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (lambda tokens, logits: logits[0], r"returned shape \(7,\); .* shape \(1, 7\)"),
        (lambda tokens, logits: None, "returned .*NoneType"),
    ],
)
def test_a_callable_that_returns_something_else_is_named(bad, complaint):
    with pytest.raises(UserError, match=complaint):
        SpeculativeDecoder(FakeModel(random_table(V), V)).generate([2], logits_processors=[bad])


# ---- in the engine -------------------------------------------------------------------------------

V = 7


def test_the_drafts_logits_are_processed_too():
    """A draft equal to the target is always accepted, with any rules."""
    model = FakeModel(random_table(V, eos_bias=-0.5), V)
    decoder = SpeculativeDecoder(model, drafter(model.table, model), None, 3)
    for temp in (0.0, 1.0):
        for result in decoder.generate([[5], [3, 4]], max_tokens=14, temp=temp, **RULES["all"]):
            assert result.stats.acceptance_rate == 1.0


def test_greedy_relaxation_compares_processed_logits():
    """The second best token is accepted, unless a processor spreads out the logits."""

    def table(source, seen):
        return np.array([-9, -9, 3.0, 2.9, -9, -9, -9], np.float32)

    model = FakeModel(table, V)
    decoder = SpeculativeDecoder(model, drafter(always(3, V), model), None, 1, delta=0.1)
    assert decoder.generate([2], max_tokens=4).tokens == [3, 2, 3, 2]
    spread = {"logits_processors": [lambda tokens, logits: 2 * logits]}
    assert decoder.generate([2], max_tokens=4, **spread).tokens == [2, 2, 2, 2]
