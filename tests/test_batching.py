"""Continuous batching: who joins when, what is in hand, and what a row without memory costs."""

import pytest

from decoder import Engine, SpeculativeDecoder
from fake_model import FakeModel, drafter, good, greedy, random_table, without
from mlx_t5 import batching
from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.network import memory
from mlx_t5.requests import Row, Settings
from mlx_t5.sampling.draws import row_key
from mlx_t5.sizes import PASS_POSITIONS

V = 7
ENDING = FakeModel(random_table(V, eos_bias=0.3), V)


def rows(lengths, **settings):
    return [
        Row([2 + i % 5] * n, Settings(**settings), row_key(0, i)) for i, n in enumerate(lengths)
    ]


def test_the_oldest_joins_first_with_those_of_like_length():
    waiting = rows([5, 90, 6, 88, 4, 30])

    def chosen(waiting, count):
        return [len(row.ids) for row in batching.next_group(waiting, count)]

    assert chosen(waiting, 3) == [5, 6, 4]
    assert chosen(waiting[1:], 2) == [90, 88]
    assert chosen(waiting[:1], 4) == [5]


class Noting:
    """An engine of which only what joins between two steps is of interest."""

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


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1024] * 7, [[1024]] * 7),  # a stream in between waits for one of them, not for seven
        ([5000, 3, 4, 2000, 6], [[5000], [3, 4, 6], [2000]]),  # one may join whatever its length
        ([300, 300, 300, 300, 40], [[300, 300, 300], [300, 40]]),
        ([500, 20, 510, 30], [[500, 510], [20, 30]]),  # padding counts: 20 would be 510
        ([10] * 40, [[10] * 40]),
    ],
)
def test_what_joins_between_two_steps_is_bounded(lengths, expected):
    engine, waiting = Noting(), rows(lengths)
    for i, row in enumerate(waiting):
        row.ids[0] = 100 + i  # no two are equal
    queue = batching.Queue(engine, 64, waiting)
    assert engine.joined_at(queue, len(expected)) == expected
    assert queue.waiting == []


def test_equal_sources_join_as_one():
    samples = [Row([3] * 900, Settings(temp=1.0), row_key(0, i)) for i in range(8)]
    engine = Noting()
    assert engine.joined_at(batching.Queue(engine, 8, samples), 1) == [[900] * 8]


class Reading(FakeModel):
    """Notes the lengths of the sources of each pass of the encoder."""

    def __init__(self, *args):
        super().__init__(*args)
        self.passes = []

    def encode(self, ids, mask=None):
        each = mx.array([ids.shape[1]] * len(ids)) if mask is None else mask.sum(axis=1)
        self.passes.append(each.tolist())
        return super().encode(ids, mask)


def different(lengths, **settings):
    """Rows no two of which are equal, so that each has to be encoded."""
    many = rows(lengths, **settings)
    for i, row in enumerate(many):
        row.ids[0] = 2 + i
    return many


def test_rows_are_encoded_ahead_in_full_passes_of_like_length():
    model = Reading(random_table(V, eos_bias=0.3), V)
    many = different([40, 9, 41, 8, 40, 10, 42, 11] * 3, max_tokens=9)
    for row in batching.run(Engine(model, None), many, 2):
        assert (row.output()[0], row.states) == (greedy(model, row.ids, 9)[0], None)
        assert row.stats.encode_seconds > 0
    assert sorted(n for each in model.passes for n in each) == sorted(len(r.ids) for r in many)
    sizes = [len(each) * max(each) for each in model.passes]
    assert max(sizes) <= PASS_POSITIONS
    assert len(sizes) <= 6, "and not one or two rows a pass, as they join"
    assert sum(sizes) - sum(map(sum, model.passes)) < 0.2 * sum(sizes), "little is padding"


def test_where_somebody_waits_a_row_is_encoded_alone():
    model = Reading(random_table(V), V)
    queue = batching.Queue(Engine(model, None), 1, different([30, 31, 32], max_tokens=2))
    queue.admit()
    assert model.passes == [[30]]


def test_the_longest_join_first_once_all_are_in_hand():
    """So that a long text does not run on alone at the end."""
    for ending, expected in ((True, [9, 8]), (False, [5, 4])):
        engine = Tried(ENDING, None)
        queue = batching.Queue(engine, 2, different([5, 9, 4, 8, 2]), bulk=True)
        queue.last = ending
        queue.admit()
        assert engine.attempts == [(0, expected)]


def test_without_memory_to_encode_ahead_rows_join_alone():
    model = SmallMemory(without(random_table(V), 1), V)  # 40 positions a pass
    many = different([38, 39, 40], max_tokens=5)
    finished = list(batching.run(Engine(model, None), many, 1))
    assert [row.error for row in finished] == [None] * 3
    for row in finished:
        assert row.output()[0] == greedy(model, row.ids, 5)[0]


def test_what_is_encoded_ahead_counts_as_memory(monkeypatch):
    required = []
    monkeypatch.setattr(memory, "require", required.append)

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
        assert drawn - done <= 2 * batching.PROMPTS_A_ROW + 1
    assert drawn == 200


def test_a_row_is_waited_for_only_when_none_is_in_hand():
    happened = []

    def source():
        for i, row in enumerate(rows([3, 4, 5], max_tokens=4)):
            happened.append(f"drawn {i}")
            yield row

    def ready(drawn):
        return drawn == 2  # the third comes with the second

    for i, _ in enumerate(batching.run(Engine(ENDING, None), source(), 2, ready)):
        happened.append(f"done {i}")
    assert happened == ["drawn 0", "done 0", "drawn 1", "drawn 2", "done 1", "done 2"]


def test_the_samples_of_a_prompt_need_not_be_waited_for():
    decoder = SpeculativeDecoder(ENDING)
    results = decoder.results(
        iter([[3], [4]]), max_tokens=4, temp=1.0, num_samples=3, ready=lambda: False
    )
    ENDING.calls.clear()
    assert len(list(results)) == 6
    assert max(len(offsets) for offsets, _ in ENDING.calls) == 3


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
    engine.insert = lambda joining, ahead: inserted.extend(joining) or insert(joining, ahead)
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


class Scarce(FakeModel):
    """Needs a unit of memory for each source token of its batch, padding included."""

    def cache_memory(self, prompts, source, target, rows=0):
        return prompts * source


class Tried(Engine):
    """Notes which rows were to join at which step."""

    steps = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.attempts = []

    def insert(self, rows, ahead=()):
        self.attempts.append((self.steps, [len(row.ids) for row in rows]))
        super().insert(rows, ahead)

    def step(self):
        self.steps += 1
        super().step()


def scarce(monkeypatch, units):
    """An engine in whose memory so many source tokens have room; its rows never end early."""
    monkeypatch.setattr(memory, "limit", lambda: units)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    return Tried(Scarce(without(random_table(V), 1), V), None)


def test_rows_wait_for_memory_while_others_run_and_fail_only_where_they_would_alone(monkeypatch):
    engine = scarce(monkeypatch, 20)
    many = rows([9, 10, 11, 21, 9, 20, 1, 2], max_tokens=6)
    finished = list(batching.run(engine, many, 4))
    assert [id(row) for row in finished] == [id(row) for row in many]
    assert [len(row.ids) for row in finished if row.error] == [21]
    assert "no memory for a prompt of 21 tokens" in finished[3].error
    for row in finished:
        assert row.error or row.output()[0] == greedy(engine.target, row.ids, 6)[0]
    assert max(len(offsets) for offsets, _ in engine.target.calls) == 2


def test_a_row_without_memory_is_tried_again_only_when_another_has_left(monkeypatch):
    engine = scarce(monkeypatch, 20)
    list(batching.run(engine, rows([15, 16], max_tokens=9), 2))
    assert engine.attempts == [(0, [16, 15]), (0, [16]), (0, [15]), (9, [15])]


def test_short_prompts_do_not_overtake_a_long_one_for_good(monkeypatch):
    engine = scarce(monkeypatch, 20)
    queue = batching.Queue(engine, 4)
    first, second, long = rows([4, 5, 20], max_tokens=5)
    later = [rows([3], max_tokens=5)[0] for _ in range(12)]
    for row in [first, second, long, *later]:  # one comes at every step
        queue.waiting.append(row)
        assert queue.admit() == []
        engine.step()
    assert len(long.output()[0]) == 5
    assert [len(batch) for _, batch in engine.attempts if 20 in batch] == [1, 3, 2, 1, 4, 2, 1]
    assert sum(row.decided > 0 for row in later) == 4, "and then they follow"


def test_a_row_that_is_refused_keeps_its_place_among_those_that_wait(monkeypatch):
    queue = batching.Queue(scarce(monkeypatch, 20), 2, rows([9, 13, 1, 8]))
    queue.admit()
    assert [len(row.ids) for row in queue.engine.rows] == [9, 8]
    queue = batching.Queue(scarce(monkeypatch, 20), 2, rows([9, 13, 1]))
    queue.admit()
    assert [len(row.ids) for row in queue.waiting] == [13, 1]


def test_nobody_waits_for_memory_on_account_of_a_row_that_is_gone(monkeypatch):
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
    with pytest.raises(UserError, match="no memory for a prompt of 50 tokens"):
        next(decoder.stream([2] * 50))


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_who_runs_out_of_memory_leaves_the_batch_as_it_was(monkeypatch, whose):
    """The target's sources are waited for last, when the draft has its rows."""
    model = FakeModel(without(random_table(V), 1), V)
    draft = drafter(good(model.table), model)
    engine = Engine(model, draft)
    first, second, third = rows([3, 50, 4], max_tokens=8)
    engine.insert([first])

    def failing(*args):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        if whose == "target":
            patch.setattr(
                "decoder.mx.eval", lambda *arrays: failing() if draft.sources[1:] else None
            )
        else:
            patch.setattr(draft.model, "encode", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.insert([second])
    assert draft.sources == [len(first.ids)]
    assert second.states is None
    engine.insert([third])
    while engine.rows:
        engine.step()
    for row in (first, third):
        assert row.output()[0] == greedy(model, row.ids, 8)[0]
