"""Tests that equal greedy texts are decoded once, and that nobody can tell but by the time."""

import random
from dataclasses import fields, replace

import pytest

from fake_model import FakeModel, contrary, drafter, good, greedy, random_table
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.reuse import AnswerStore
from mlx_t5.engine.rows import Row, Stats
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings
from mlx_t5.text.prompts import Prompt

pytestmark = pytest.mark.usefixtures("unpadded")  # fake models count positions

V = 7
TABLE = random_table(V, eos_bias=0.3)


def decoder(draft=good):
    model = FakeModel(TABLE, V)
    return SpeculativeDecoder(model, draft and drafter(draft(model.table), model))


def rows_decoded(model):
    """The number of row steps."""
    return sum(len(offsets) for offsets, _ in model.calls)


@pytest.mark.parametrize("draft", [good, contrary, None])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_equal_prompts_get_the_targets_own_text_and_are_decoded_once(draft, batch_size):
    rng = random.Random(batch_size)
    prompts = [[2 + rng.randrange(5)] * rng.randint(1, 3) for _ in range(40)]
    for most in (1, 4, 12):  # a text may end at max_tokens or before
        one, every = decoder(draft), decoder(draft)
        results = one.generate(prompts, max_tokens=most, batch_size=batch_size)
        full = every.generate(prompts, max_tokens=most, batch_size=batch_size, reuse=False)
        for prompt, result, alone in zip(prompts, results, full, strict=True):
            assert (result.tokens, result.finish_reason) == greedy(one.model, prompt, most)
            assert result.stats.prompt_tokens == len(prompt)
            assert result.stats.generated_tokens == len(result.tokens) == len(alone.tokens)
        decoded = [result for result in results if not result.stats.reused]
        assert len(decoded) == len({tuple(prompt) for prompt in prompts})
        assert rows_decoded(one.model) < rows_decoded(every.model)
        assert not any(result.stats.reused for result in full)


def test_a_reused_text_counts_its_tokens_and_proposals_and_nothing_else():
    first, again = decoder().generate([[5, 2], [5, 2]], max_tokens=12, num_draft=3)
    tokens, peak = len(first.tokens), again.stats.peak_memory_bytes
    counts = {name: getattr(first.stats, name) for name in ("drafted", "accepted")}
    counts["acceptance_rate"] = first.stats.acceptance_rate
    assert counts["accepted"] > 0
    own = {"peak_memory_bytes": peak, "reused": 1, "reused_tokens": tokens}
    assert again.stats == Stats(2, tokens, **counts, **own)
    assert (again.tokens, again.origins) == (first.tokens, first.origins)


VALUES = {  # of each setting
    "max_tokens": (4, 12),
    "temp": (0.0, 0.0, 0.0, 1.0),
    "num_draft": (0, 1, 5),
    "delta": (0.0, 0.0, 0.5, 1.0),
    "repetition_penalty": (1.0, 1.0, 1.5),
    "no_repeat_ngram_size": (0, 0, 2),
    "min_tokens": (0, 0, 5),
    "logits_processors": ((), (), (lambda tokens, logits: -logits,)),
    "bad_words_ids": (None, None, [[3]]),
    "suppress_tokens": (None, None, 4),
    "forced_bos_token_id": (None, None, 5),
    "forced_eos_token_id": (None, None, 1),
    "stop": ((),),  # needs a tokenizer
    "num_beams": (1, 1, 1, 2),
    "repetition_detection": (None, None, {"max_pattern_size": 3, "min_count": 2}),
} | dict.fromkeys(("top_k", "top_p", "min_p"), ())  # of samples
VALUES |= dict.fromkeys(("length_penalty", "early_stopping", "num_return_sequences"), ())  # beams


def test_with_all_settings_a_text_of_the_store_is_the_text_of_the_prompt_alone(monkeypatch):
    assert set(VALUES) == {field.name for field in fields(Settings)}
    rng, reused = random.Random(5), 0
    kept = AnswerStore([1])  # of all calls, as in a server
    monkeypatch.setattr("mlx_t5.engine.scheduler.AnswerStore", lambda eos: kept)
    for _ in range(60):
        settings = {n: rng.choice(values) for n, values in VALUES.items() if values}
        predictions = [rng.choice([None, [5, 4, 3, 2]]) for _ in range(6)]
        if settings["num_beams"] > 1:
            settings |= {"temp": 0.0, "delta": 0.0, "repetition_detection": None}
            predictions = [None] * 6
        prompts = [[rng.choice([3, 4])] for _ in predictions]
        one = decoder()
        prompts = [Prompt(*each) for each in zip(prompts, range(6), predictions, strict=True)]
        request = one.request(**settings)
        results = one.results(prompts, request, rng.randint(1, 4))
        for i, result in enumerate(results):
            alone = replace(request, reuse=False)
            (expected,) = decoder().results(prompts[i : i + 1], alone)
            for r in (result, expected):
                r.counts = [r.stats.drafted, r.stats.accepted, r.stats.speculation.predicted]
            assert (result.tokens, result.origins) == (expected.tokens, expected.origins), settings
            assert (result.finish_reason, result.counts) == (
                expected.finish_reason,
                expected.counts,
            ), settings
            reused += result.stats.reused
    assert reused > 20


def test_a_prediction_is_seen_by_nobody_else():
    prompt, secret = [4, 2], [6, 5, 6, 5, 6]
    alone = decoder(None).generate([prompt], delta=1.0)[0].tokens
    options = {"delta": 1.0, "num_draft": 5, "prediction": [secret, None]}
    predicted, other = decoder(None).generate([prompt] * 2, **options)
    assert predicted.tokens[:5] == secret and other.tokens == alone


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": 1.0},
        {"delta": 0.5},
        {"num_beams": 2},
        {"logits_processors": [lambda tokens, logits: logits]},
        {"reuse": False},
    ],
)
def test_what_may_differ_is_decoded_each_time(settings):
    results = decoder().generate([[4, 2]] * 3, max_tokens=6, **settings)
    assert [result.stats.reused for result in results] == [0, 0, 0]


def test_texts_with_stop_strings_and_pieces_of_documents_are_reused_as_text():
    pair = SpeculativeDecoder.from_pretrained(BUNDLED / "target", BUNDLED / "draft")
    cats = "translate English to French: I have two cats."
    for stop in ((), ("deux",), ("nothing like this",)):
        first, again = pair.generate([cats, cats], stop=stop)
        assert again.stats.reused == 1
        assert (again.text, again.tokens) == (first.text, first.tokens)
        assert again.finish_reason == first.finish_reason == "stop"
    letter = cats + " We have two dogs. I have two cats.\n\n- I have two cats.\n"
    once, each = (pair.generate(letter, split="sentences", reuse=r) for r in (True, False))
    assert (once.text, once.tokens, once.stats.pieces) == (each.text, each.tokens, 4)
    assert (once.stats.reused, each.stats.reused) == (2, 0)
    assert once.stats.generated_tokens == each.stats.generated_tokens
    assert once.stats.target_calls < each.stats.target_calls


# ---- the store -----------------------------------------------------------------------------------


def row(*ids, **settings):
    """A row that may share its answer."""
    settings = Settings(**settings)
    return Row(list(ids), settings, row_key(0, 0), answer_key=(bytes(ids), settings))


def finish(store, one, *tokens):
    one.tokens = [0]
    one.commit([*tokens, 1], len(tokens), "target", [1])
    return store.update()


def test_rows_wait_for_an_equal_one_and_later_ones_are_finished_at_once():
    store = AnswerStore([1])
    first, second, other = row(4), row(4), row(4, max_tokens=9)
    assert store.add(first) and not store.add(second) and store.add(other)
    assert store.update() == ([], []) and second.finish_reason is None
    assert finish(store, first, 5, 6) == ([second], [])
    assert second.output()[0] == [5, 6] and second.finish_reason == "stop"
    third = row(4)
    assert not store.add(third) and third.output()[0] == [5, 6]


def test_a_failed_row_gives_no_answer_and_the_next_equal_one_is_decoded():
    store = AnswerStore([1])
    first, second, third = rows = [row(4) for _ in range(3)]
    assert [store.add(one) for one in rows] == [True, False, False]
    first.fail("no memory")
    assert store.update() == ([], [second])
    assert finish(store, second, 5) == ([third], [])


def test_a_text_that_a_lack_of_memory_has_cut_off_is_not_kept():
    store = AnswerStore([1])
    for tokens, reason, is_kept in (([5, 6], "length", False), ([5, 1], "stop", True)):
        first, second = row(4), row(4)
        assert store.add(first) and not store.add(second)
        first.settings = replace(first.settings, max_tokens=2)  # as `Scheduler` lowers it
        first.tokens = [0]
        first.commit(tokens, len(tokens) - 1, "target", [1])
        assert store.update() == ([second], []), "which waited for the same memory"
        assert first.finish_reason == second.finish_reason == reason
        assert store.add(row(4)) is not is_kept
        store.decoding.clear()


def test_a_row_that_leaves_early_gives_no_answer():
    store = AnswerStore([1])
    rows = [row(4) for _ in range(4)]
    for one in rows:
        store.add(one)
    assert store.remove([rows[2]]) == []
    assert store.remove(rows[:2]) == [rows[3]], "the first left is decoded in place of the first"
    assert store.remove([rows[3]]) == [] and store.add(row(4))


def test_the_store_is_bounded_by_number_and_by_bytes_and_drops_what_was_used_least_recently():
    a, b, c = (row(n) for n in (2, 3, 4))
    store, one = AnswerStore([1]), row(9)
    assert store.add(one)
    finish(store, one, 5)
    size = store.bytes
    assert size > 0
    for store in (AnswerStore([1], 2), AnswerStore([1], 99, 2 * size)):
        for one in (a, b):
            assert store.add(one)
            finish(store, one, 5)
        assert not store.add(row(2)), "used again"
        assert store.add(c)
        finish(store, c, 5)
        assert len(store.answers) == 2 and store.bytes == 2 * size
        assert store.add(row(3)) and not store.add(row(2))
        for one in (a, b, c):
            one.finish_reason = None
    assert AnswerStore([1], 0).add(row(2)) and AnswerStore([1], 0).add(row(2))
