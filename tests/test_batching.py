"""Continuous batching: who joins when, what is in hand, and what a row without memory costs."""

import pytest

import batching
from acceptance import row_key
from backend import UserError
from decoder import SpeculativeDecoder
from engine import Engine
from fake_model import FakeModel, drafter, good, greedy, random_table, without
from results import Row, Settings

V = 7
ENDING = FakeModel(random_table(V, eos_bias=0.3), V)


def rows(lengths, **settings):
    return [
        Row([2 + i % 5] * n, Settings(**settings), row_key(0, i)) for i, n in enumerate(lengths)
    ]


def test_the_oldest_joins_first_with_those_of_like_length():
    waiting = rows([5, 90, 6, 88, 4, 30])

    def split(waiting, count):
        return [[len(row.ids) for row in part] for part in batching.choose(waiting, count)]

    assert split(waiting, 3) == [[5, 6, 4], [90, 88, 30]]
    assert split(waiting[1:], 2) == [[90, 88], [6, 4, 30]]
    assert split(waiting[:1], 4) == [[5], []]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_row_comes_back_in_order(batch_size):
    many = rows([1 + 7 * i % 13 for i in range(60)], max_tokens=9)
    finished = list(batching.run(Engine(ENDING, None), iter(many), batch_size))
    assert [id(row) for row in finished] == [id(row) for row in many]
    for row in finished:
        assert (row.output()[0], row.finish_reason) == greedy(ENDING, row.ids, 9)


def test_only_a_window_is_in_hand():
    drawn = 0

    def source():
        nonlocal drawn
        for row in rows([3] * 200, max_tokens=4):
            drawn += 1
            yield row

    for done, _ in enumerate(batching.run(Engine(ENDING, None), source(), 2)):
        assert drawn - done <= 2 * batching.WINDOW + 1
    assert drawn == 200


def test_a_long_row_does_not_hold_up_the_places_beside_it():
    """One row ends at its first step, another runs to max_tokens."""

    def table(source, seen):
        return random_table(V, eos_bias=99 if source[0] == 2 else -99)(source, seen)

    model = FakeModel(table, V)
    prompts = [[3, 3], [2], [2], [2], [2], [2]]
    results = SpeculativeDecoder(model, drafter(good(table), model)).generate(
        prompts, max_tokens=12, batch_size=2
    )
    assert [len(r.tokens) for r in results] == [12, 0, 0, 0, 0, 0]
    assert [r.finish_reason for r in results] == ["length"] + ["stop"] * 5
    assert all(r.stats.target_calls == 1 for r in results[1:])


class SmallMemory(FakeModel):
    """Cannot encode more than so many source tokens at once, padding included."""

    limit = 40

    def encode(self, ids, mask=None):
        if ids.size > self.limit:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return super().encode(ids, mask)


def test_a_row_that_is_bad_from_the_start_is_handed_back_in_its_place():
    many = rows([3] * 6, max_tokens=4)
    many[2].fail("a prompt is empty")
    engine = Engine(ENDING, None)
    inserted, insert = [], engine.insert
    engine.insert = lambda joining: inserted.extend(joining) or insert(joining)
    finished = list(batching.run(engine, many, 2))
    assert [id(row) for row in finished] == [id(row) for row in many]
    assert [id(row) for row in inserted] == [id(row) for row in many if row is not many[2]]
    assert (finished[2].finish_reason, finished[2].stats.target_calls) == ("error", 0)


def test_a_row_that_memory_does_not_suffice_for_is_reported_and_the_others_finish():
    model = SmallMemory(without(random_table(V), 1), V)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model))
    prompts = [[2] * n for n in (4, 41, 30, 5, 39)]
    results = decoder.generate(prompts, max_tokens=6, batch_size=3)
    assert [r.finish_reason for r in results] == ["length", "error", "length", "length", "length"]
    assert "no memory for a prompt of 41 tokens" in results[1].error
    assert "Unable to allocate" in results[1].error
    assert (results[1].text, results[1].tokens) == (None, [])
    for prompt, result in zip(prompts, results, strict=True):
        if result.error is None:
            assert result.tokens == greedy(model, prompt, 6)[0]


def test_a_stream_without_memory_is_an_error():
    decoder = SpeculativeDecoder(SmallMemory(random_table(V), V))
    with pytest.raises(UserError, match="no memory for a prompt of 50 tokens"):
        next(decoder.stream([2] * 50))


def test_a_draft_that_runs_out_of_memory_leaves_the_batch_as_it_was():
    model = FakeModel(without(random_table(V), 1), V)
    draft = drafter(good(model.table), model)
    engine = Engine(model, draft)
    first, second = rows([3, 50], max_tokens=8)
    engine.insert([first])
    encode = draft.model.encode

    def failing(ids, mask=None):
        raise RuntimeError("no memory")

    draft.model.encode = failing
    with pytest.raises(RuntimeError, match="no memory"):
        engine.insert([second])
    draft.model.encode = encode
    while engine.rows:
        engine.step()
    assert first.output()[0] == greedy(model, first.ids, 8)[0]
