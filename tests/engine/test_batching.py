"""Tests continuous batching: when rows join, and how many are read ahead."""

import pytest

from batches import rows
from decoder import Engine, SpeculativeDecoder
from fake_model import FakeModel, greedy, random_table
from mlx_t5.engine import batching
from mlx_t5.engine.rows import Stats

V = 7
ENDING = FakeModel(random_table(V, eos_bias=0.3), V)


class Noting:
    """An engine that only records which rows join between two steps."""

    def __init__(self):
        self.rows, self.joined = [], []

    def insert(self, rows, ahead=()):
        assert not ahead, "a request that joins waits for nobody else's encoding"
        self.joined[-1] += [len(row.ids) for row in rows]
        self.rows += rows

    def joined_at(self, queue, steps):
        for _ in range(steps):
            self.joined.append([])
            queue.admit()
        return self.joined


def test_the_oldest_row_joins_first_with_rows_of_similar_length():
    lengths, engine = [5, 90, 6, 88, 4, 30], Noting()
    assert engine.joined_at(batching.Queue(engine, 3, rows(lengths)), 1) == [[5, 6, 4]]
    engine = Noting()
    assert engine.joined_at(batching.Queue(engine, 2, rows(lengths[1:])), 1) == [[90, 88]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1024] * 7, [[1024]] * 7),  # a running row waits for one row that joins, not for seven
        ([5000, 3, 4, 2000, 6], [[5000], [3, 4, 6], [2000]]),  # one row of any length may join
        ([300, 300, 300, 300, 40], [[300, 300, 300], [300, 40]]),
        ([500, 20, 510, 30], [[500, 510], [20, 30]]),  # padding counts: 20 would cost 510
        ([10] * 40, [[10] * 40]),
    ],
)
def test_the_tokens_that_join_between_two_steps_are_bounded(lengths, expected):
    engine, waiting = Noting(), rows(lengths)
    for i, row in enumerate(waiting):
        row.ids[0] = 100 + i  # makes all rows different
    queue = batching.Queue(engine, 64, waiting)
    assert engine.joined_at(queue, len(expected)) == expected
    assert queue.waiting == []


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_row_comes_back_in_order(batch_size):
    many = rows([1 + 7 * i % 13 for i in range(60)], max_tokens=9)
    many[20].fail("a prompt is empty")
    finished = list(batching.decode_rows(Engine(ENDING, None), iter(many), batch_size))
    assert [id(row) for row in finished] == [id(row) for row in many]
    bad = finished.pop(20)
    assert (bad.finish_reason, bad.stats, bad.committed) == ("error", Stats(), [])
    for row in finished:
        assert (row.output()[0], row.finish_reason) == greedy(ENDING, row.ids, 9)


def test_few_rows_are_read_before_they_are_decoded():
    drawn = 0

    def source():
        nonlocal drawn
        for row in rows([3] * 200, max_tokens=4):
            drawn += 1
            yield row

    for done, _ in enumerate(batching.decode_rows(Engine(ENDING, None), source(), 2)):
        assert drawn - done <= 2 * batching.PROMPTS_A_ROW + 1
    assert drawn == 200


def test_the_next_row_is_awaited_only_when_none_is_running():
    happened = []

    def source():
        for i, row in enumerate(rows([3, 4, 5], max_tokens=4)):
            happened.append(f"drawn {i}")
            yield row

    def ready(drawn):
        return drawn == 2  # the third row is ready with the second

    for i, _ in enumerate(batching.decode_rows(Engine(ENDING, None), source(), 2, ready)):
        happened.append(f"done {i}")
    assert happened == ["drawn 0", "done 0", "drawn 1", "drawn 2", "done 1", "done 2"]


def test_all_samples_of_a_prompt_run_together():
    decoder = SpeculativeDecoder(ENDING)
    job = decoder.job(max_tokens=4, temp=1.0, num_samples=3)
    results = decoder.results(iter([[3], [4]]), job, ready=lambda: False)
    ENDING.calls.clear()
    assert len(list(results)) == 6
    assert max(len(offsets) for offsets, _ in ENDING.calls) == 3
