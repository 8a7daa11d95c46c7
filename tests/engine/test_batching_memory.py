"""Tests rows that do not fit into memory: which wait, which fail, and what stays unchanged."""

import pytest

from batches import Tried, different, rows
from decoder import Engine, SpeculativeDecoder
from fake_model import FakeModel, drafter, good, greedy, random_table, without
from mlx_t5.backend import mx
from mlx_t5.engine import batching
from mlx_t5.errors import UserError
from mlx_t5.network import memory

pytestmark = pytest.mark.usefixtures("unpadded")  # fake models count positions

V = 7
ENDING = FakeModel(random_table(V, eos_bias=0.3), V)


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
    finished = list(batching.decode_rows(Engine(model, None), many, 1))
    assert [row.error for row in finished] == [None] * 3
    for row in finished:
        assert row.output()[0] == greedy(model, row.ids, 5)[0]


def test_rows_encoded_ahead_count_as_memory(monkeypatch):
    required = []
    monkeypatch.setattr(memory, "require", lambda needed, ranks: required.append(needed))

    class Counting(FakeModel):
        def encoder_memory(self, rows, source):
            return rows * source

    engine = Engine(Counting(random_table(V), V), None)
    first, *others = different([10, 12, 11])
    engine.insert([first], others)
    engine.insert(others)
    assert required == [3 * 12, 2 * 12]
    long = different([100] * 9)
    engine.insert(long[:1], long[1:])
    assert required[2] == 3 * 100, "no pass is larger than that"


class Scarce(FakeModel):
    """A model that needs a unit of memory for each source position of its batch."""

    def cache_memory(self, prompts, source, target, rows=0):
        return prompts * source


def scarce(monkeypatch, units):
    """Returns an engine with memory for `units` source positions; its rows never end early."""
    monkeypatch.setattr(memory, "limit", lambda: units)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    return Tried(Scarce(without(random_table(V), 1), V), None)


def test_rows_wait_for_memory_and_fail_only_if_they_would_fail_alone(monkeypatch):
    engine = scarce(monkeypatch, 20)
    many = rows([9, 10, 11, 21, 9, 20, 1, 2], max_tokens=6)
    finished = list(batching.decode_rows(engine, many, 4))
    assert [id(row) for row in finished] == [id(row) for row in many]
    assert [len(row.ids) for row in finished if row.error] == [21]
    assert "no memory for a prompt of 21 tokens" in finished[3].error
    for row in finished:
        assert row.error or row.output()[0] == greedy(engine.target, row.ids, 6)[0]
    assert max(len(offsets) for offsets, _ in engine.target.calls) == 2


def test_short_prompts_do_not_overtake_a_long_one_for_good(monkeypatch):
    engine = scarce(monkeypatch, 20)
    queue = batching.Queue(engine, 4)
    first, second, long = rows([4, 5, 20], max_tokens=5)
    later = [rows([3], max_tokens=5)[0] for _ in range(12)]
    for row in [first, second, long, *later]:  # one row arrives before each step
        queue.waiting.append(row)
        assert queue.admit() == []
        engine.step()
    assert len(long.output()[0]) == 5
    assert [len(batch) for _, batch in engine.attempts if 20 in batch] == [1, 3, 2, 1, 4, 2, 1]
    assert sum(row.decided > 0 for row in later) == 4, "and then they follow"


def test_a_refused_row_keeps_its_place_in_the_queue(monkeypatch):
    queue = batching.Queue(scarce(monkeypatch, 20), 2, rows([9, 13, 1, 8]))
    queue.admit()
    assert [len(row.ids) for row in queue.engine.rows] == [9, 8]
    queue = batching.Queue(scarce(monkeypatch, 20), 2, rows([9, 13, 1]))
    queue.admit()
    assert [len(row.ids) for row in queue.waiting] == [13, 1]


def test_no_row_waits_for_memory_because_of_a_removed_row(monkeypatch):
    engine = scarce(monkeypatch, 20)
    queue = batching.Queue(engine, 4, rows([4, 20, 3], max_tokens=50))
    queue.admit()
    assert [len(row.ids) for row in queue.waiting] == [20]
    queue.waiting += rows([5], max_tokens=50)
    assert (queue.admit(), len(engine.rows)) == ([], 2)
    queue.remove(queue.waiting[:1])
    assert (queue.admit(), len(engine.rows), queue.waiting) == ([], 3, [])


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
