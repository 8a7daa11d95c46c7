"""Tests that equal greedy texts are decoded once, and that nobody can tell but by the time."""

import random

import pytest

from fake_model import FakeModel, contrary, drafter, good, greedy, random_table
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.reuse import AnswerStore, key_of, size_of
from mlx_t5.engine.rows import Row, Stats
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings

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


def test_a_reused_text_counts_its_tokens_and_nothing_else():
    first, again = decoder().generate([[4, 2], [4, 2]], max_tokens=12)
    tokens = len(first.tokens)
    peak = again.stats.peak_memory_bytes
    assert again.stats == Stats(2, tokens, peak_memory_bytes=peak, reused=1, reused_tokens=tokens)
    assert (again.tokens, again.writers) == (first.tokens, first.writers)


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": 1.0},
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
    return Row(list(ids), Settings(**settings), row_key(0, 0), shareable=True)


def finish(store, one, *tokens):
    one.tokens = [0]
    one.commit([*tokens, 1], len(tokens), "target", [1])
    return store.settle()


def test_rows_wait_for_an_equal_one_and_later_ones_are_finished_at_once():
    store = AnswerStore([1])
    first, second, other = row(4), row(4), row(4, max_tokens=9)
    assert store.claim(first) and not store.claim(second) and store.claim(other)
    assert store.settle() == ([], []) and second.finish_reason is None
    assert finish(store, first, 5, 6) == ([second], [])
    assert second.output()[0] == [5, 6] and second.finish_reason == "stop"
    third = row(4)
    assert not store.claim(third) and third.output()[0] == [5, 6]


def test_a_failed_row_gives_no_answer_and_the_next_equal_one_is_decoded():
    store = AnswerStore([1])
    first, second, third = rows = [row(4) for _ in range(3)]
    assert [store.claim(one) for one in rows] == [True, False, False]
    first.fail("no memory")
    assert store.settle() == ([], [second])
    assert finish(store, second, 5) == ([third], [])


def test_a_row_that_leaves_early_gives_no_answer():
    store = AnswerStore([1])
    rows = [row(4) for _ in range(4)]
    for one in rows:
        store.claim(one)
    assert store.drop([rows[2]]) == []
    assert store.drop(rows[:2]) == [rows[3]], "the first left is decoded in place of the first"
    assert store.drop([rows[3]]) == [] and store.claim(row(4))


def test_the_store_is_bounded_by_number_and_by_bytes_and_drops_what_was_used_least_recently():
    a, b, c = (row(n) for n in (2, 3, 4))
    size = size_of(key_of(a), ([0, 5, 1], [], a.settings))
    for store in (AnswerStore([1], 2), AnswerStore([1], 99, 2 * size)):
        for one in (a, b):
            assert store.claim(one)
            finish(store, one, 5)
        assert not store.claim(row(2)), "used again"
        assert store.claim(c)
        finish(store, c, 5)
        assert len(store.answers) == 2 and store.bytes == 2 * size
        assert store.claim(row(3)) and not store.claim(row(2))
        for one in (a, b, c):
            one.finish_reason = None
    assert AnswerStore([1], 0).claim(row(2)) and AnswerStore([1], 0).claim(row(2))
