"""Tests continuous batching: when rows join, how many are read ahead, and scarce memory."""

from itertools import islice

import pytest

from fake_model import FakeModel, drafter, good, greedy, random_table, without
from mlx_t5.backend import device_memory as memory
from mlx_t5.backend import mx
from mlx_t5.decoder import Engine, SpeculativeDecoder
from mlx_t5.engine import scheduler
from mlx_t5.engine.reuse import AnswerStore
from mlx_t5.engine.rows import Row, Stats
from mlx_t5.errors import UserError
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings

pytestmark = pytest.mark.usefixtures("unpadded")  # fake models count positions

V = 7
ENDING = FakeModel(random_table(V, eos_bias=0.3), V)


def rows(lengths, **settings):
    return [
        Row([2 + i % 5] * n, Settings(**settings), row_key(0, i)) for i, n in enumerate(lengths)
    ]


def alone(many):
    """Returns prompts with one row each."""
    return ([row] for row in many)


def different(lengths, **settings):
    """Returns rows that all differ, so that each has to be encoded."""
    many = rows(lengths, **settings)
    for i, row in enumerate(many):
        row.ids[0] = 2 + i
    return many


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([300, 300, 300, 300], 2), ([500, 20, 510], 1), ([5000, 3], 0), ([10] * 40, 39)],
)
def test_the_tokens_that_join_between_two_steps_are_bounded(lengths, count):
    """Padding counts, so a row of 20 tokens costs 510 beside one of 510."""
    first, *others = different(lengths)
    assert len(scheduler.fitting([first], others, 1024)) == count


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_row_comes_back_in_order(batch_size):
    many = rows([1 + 7 * i % 13 for i in range(60)], max_tokens=9)
    many[20].fail("a prompt is empty")
    finished = list(scheduler.decode_rows(Engine(ENDING, None), alone(many), batch_size))
    assert [id(row) for row in finished] == [id(row) for row in many]
    bad = finished.pop(20)
    assert (bad.finish_reason, bad.stats, bad.tokens) == ("error", Stats(), [])
    for row in finished:
        assert (row.output()[0], row.finish_reason) == greedy(ENDING, row.ids, 9)


def test_few_rows_are_read_before_they_are_decoded():
    drawn = 0

    def source():
        nonlocal drawn
        for row in rows([3] * 200, max_tokens=4):
            drawn += 1
            yield row

    for done, _ in enumerate(scheduler.decode_rows(Engine(ENDING, None), alone(source()), 2)):
        assert drawn - done <= 2 * scheduler.PROMPTS_A_ROW + 1
    assert drawn == 200


def test_the_next_row_is_awaited_only_when_none_is_running():
    happened = []

    def source():
        for i, row in enumerate(rows([3, 4, 5], max_tokens=4)):
            happened.append(f"drawn {i}")
            yield row

    many = source()
    prompts = (islice(many, count) for count in (1, 2))  # the third row is ready with the second
    finished = scheduler.decode_rows(Engine(ENDING, None), prompts, 2, lambda: False)
    for i, _ in enumerate(finished):
        happened.append(f"done {i}")
    assert happened == ["drawn 0", "done 0", "drawn 1", "drawn 2", "done 1", "done 2"]


class SmallMemory(FakeModel):
    """A model that cannot encode more than `limit` source positions at once."""

    limit = 40

    def encode(self, ids, mask=None):
        if ids.size > self.limit:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return super().encode(ids, mask)


def test_without_memory_to_encode_ahead_rows_join_alone():
    model = SmallMemory(without(random_table(V), 1), V)  # at most 40 positions a pass
    many = different([38, 39, 40], max_tokens=5)
    finished = list(scheduler.decode_rows(Engine(model, None), alone(many), 1))
    assert [row.error for row in finished] == [None] * 3
    for row in finished:
        assert row.output()[0] == greedy(model, row.ids, 5)[0]


class Scarce(FakeModel):
    """A model that needs a unit of memory for each source position of its batch."""

    def cache_memory(self, prompts, source, target, rows=0):
        return prompts * source


def scarce(monkeypatch, units):
    """Returns an engine with memory for `units` source positions; its rows never end early."""
    monkeypatch.setattr(memory, "limit", lambda: units)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    return Engine(Scarce(without(random_table(V), 1), V), None)


def test_rows_wait_for_memory_and_fail_only_if_they_would_fail_alone(monkeypatch):
    engine = scarce(monkeypatch, 20)
    many = rows([9, 10, 11, 21, 9, 20, 1, 2], max_tokens=6)
    finished = list(scheduler.decode_rows(engine, alone(many), 4))
    assert [id(row) for row in finished] == [id(row) for row in many]
    assert [len(row.ids) for row in finished if row.error] == [21]
    assert "no memory for a prompt of 21 tokens" in finished[3].error
    for row in finished:
        assert row.error or row.output()[0] == greedy(engine.target, row.ids, 6)[0]
    assert max(len(offsets) for offsets, _ in engine.target.calls) == 2


def test_short_prompts_do_not_overtake_a_long_one_for_good(monkeypatch):
    engine = scarce(monkeypatch, 20)
    queue = scheduler.Scheduler(engine, 4)
    first, second, long = rows([4, 5, 20], max_tokens=5)
    later = [rows([3], max_tokens=5)[0] for _ in range(12)]
    for row in [first, second, long, *later]:  # one row arrives before each step
        queue.submit(row)
        assert not any(row.error for row in queue.step())
    assert len(long.output()[0]) == 5
    assert sum(row.decided > 0 for row in later) == 4, "and then they follow"


def test_a_step_returns_the_rows_that_it_changed_and_removed_rows_never_return(monkeypatch):
    engine = scarce(monkeypatch, 20)
    store = AnswerStore([1])
    queue = scheduler.Scheduler(engine, 2, store)
    large, one, equal, last, other = many = rows([21, 3, 3, 3, 4], max_tokens=2)
    for row in (one, equal, last):
        row.ids, row.answer_key = one.ids, (b"", row.settings)
    for row in many:
        queue.submit(row)
    assert queue.waiting == [large, one, other] and store.waiting == [equal, last]
    refused, *advanced = queue.step()
    assert refused is large and large.error and advanced == [other], "of a nearer length"
    queue.remove([one, other])
    assert engine.rows == [] and queue.waiting == [equal], "which follows its equal row"
    assert queue.step() == [equal]
    assert queue.step() == [equal, last] and last.stats.reused
    assert last.tokens == equal.tokens and not (one.finish_reason or other.finish_reason)


def test_a_stream_without_memory_is_an_error():
    decoder = SpeculativeDecoder(SmallMemory(random_table(V), V))
    with pytest.raises(UserError, match="no memory for a prompt of 50 tokens .*Unable to alloc"):
        next(decoder.stream([2] * 50))


def test_a_row_that_runs_out_of_memory_leaves_the_batch_unchanged(monkeypatch):
    model = FakeModel(without(random_table(V), 1), V)
    draft = drafter(good(model.table), model)
    engine = Engine(model, draft)
    first, second, third = rows([3, 50, 4], max_tokens=8, num_draft=5)
    engine.insert([first])

    def failing(*args):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_t5.engine.batch.mx.synchronize", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.insert([second])
    assert draft.sources == [first.ids]
    assert second.states is None
    engine.insert([third])
    while engine.rows:
        engine.step()
    for row in (first, third):
        assert row.output()[0] == greedy(model, row.ids, 8)[0]
