"""Measuring with a clock of the test's own, and the file that remembers."""

import json
import os

import pytest

import calibration
import memory
from calibration import PAST, PLANS, SOURCE, cache_folder, identity, measure_costs, sample, timer
from config import T5Config
from decoder import SpeculativeDecoder
from draft_length import LONGEST, StepCosts
from model import T5, mx
from results import Settings

SHAPE = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
KEY = {"device": "a test"}
COSTS = StepCosts(2, 0.25, tuple(1.0 + n for n in range(LONGEST + 1)), 0.5)


class Clock:
    """Seconds that pass only where the test says so, and by `tick` with every look."""

    now, tick = 0.0, 0.0

    def __call__(self):
        self.now += self.tick
        return self.now


def model(**shape):
    return T5(T5Config(**{**SHAPE, **shape}))


def timed(clock, cost):
    def seconds(drafted, copied):
        spent = cost(drafted, copied)
        clock.now += spent
        return spent

    return seconds


def taken(clock, cost, drafts=True, budget=0.4):
    return sample(timed(clock, cost), drafts, budget, clock)


def test_a_small_model_has_every_point_measured():
    clock, seen = Clock(), set()

    def cost(drafted, copied):
        seen.add((drafted, copied))
        start = 3e-4 if drafted else 0.0
        return 1e-3 + 1e-4 * max(drafted, copied) + 2e-5 * drafted + start

    draft, verify, start = taken(clock, cost)
    assert seen == set(PLANS)
    assert (draft, start) == (pytest.approx(2e-5), pytest.approx(3e-4))
    assert verify == pytest.approx([1e-3 + 1e-4 * n for n in range(LONGEST + 1)])
    assert clock.now <= 0.4
    seen.clear()
    assert taken(Clock(), cost, drafts=False)[0] == 0.0
    assert seen == {plan for plan in PLANS if not plan[0]}


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("cost", [0.01, 0.07, 0.15, 3.0])
def test_a_large_model_gets_by_with_the_first_points(cost, drafts):
    clock, calls = Clock(), []

    def constant(drafted, copied):
        calls.append((drafted, copied))
        return cost

    taken(clock, constant, drafts)
    plans = [plan for plan in PLANS if drafts or not plan[0]]
    assert calls[: len(plans)] == plans[: len(calls)]
    assert len(calls) >= 2 + drafts
    assert clock.now <= max(0.4, (2 + drafts) * cost) + 1e-9


def test_between_points_costs_lie_on_a_line():
    clock = Clock()
    draft, verify, start = taken(clock, lambda d, n: 0.2 + 0.01 * n + 0.3 * d, budget=0.1)
    assert verify == pytest.approx([0.2 + 0.01 * n for n in range(LONGEST + 1)])
    # The step with drafts has to verify them too.
    assert (draft, start) == (pytest.approx(0.3 - 0.01), 0.0)


def test_the_least_of_several_counts():
    calls = []

    def noisy(drafted, copied):
        calls.append(drafted)
        return 0.001 if len(calls) > len(PLANS) else 0.002

    assert set(taken(Clock(), noisy)[1]) == {0.001}


def test_what_falls_is_levelled_out_and_the_rest_left_alone():
    assert calibration._rising([1.0, 1.5, 1.5, 2.0]) == [1.0, 1.5, 1.5, 2.0]
    assert calibration._rising([1.0, 1.6, 1.2, 2.0]) == pytest.approx([1.0, 1.4, 1.4, 2.0])
    assert calibration._rising([1.0, 3.0, 2.0, 1.0]) == pytest.approx([1.0, 2.0, 2.0, 2.0])


def test_fewer_positions_never_cost_more_and_a_draft_never_less_than_nothing():
    draft, verify, start = taken(Clock(), lambda d, n: 1.0 if d else {0: 5.0}.get(n, 2.0))
    assert set(verify) == {3.5}, "the mean of the two points that there was time for"
    assert (draft, start) == (0.0, 0.0)


def test_measured_once_and_then_read(tmp_path, monkeypatch):
    target, draft = model(), model(d_ff=4)
    first = measure_costs(target, draft, [1, 3], folder=tmp_path)
    assert [costs.rows for costs in first.measured] == [1, 3]
    assert len(list(tmp_path.iterdir())) == 2

    def stopped(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration, "sample", stopped)
    slow = Clock()
    slow.tick = 100.0
    assert measure_costs(target, draft, [1, 3], None, tmp_path, slow) == first
    for other in ((model(d_ff=16), draft), (target, None)):
        with pytest.raises(AssertionError, match="measured again"):
            measure_costs(*other, [1], None, tmp_path, slow)


def test_rows_whose_steps_would_take_too_long_are_left_out(tmp_path):
    slow, clock = Clock(), Clock()
    slow.tick, clock.tick = 0.11, 0.001
    (one,) = measure_costs(model(), None, [1, 16], None, tmp_path / "slow", slow).measured
    assert one.regular == pytest.approx(0.11)
    assert slow.now < 1.0
    assert len(measure_costs(model(), None, [1, 16], None, tmp_path / "fast", clock).measured) == 2


def test_points_that_take_long_are_measured_once():
    seen = []

    def cost(drafted, copied):
        seen.append((drafted, copied))
        return 0.001 * (1 + drafted + copied)

    taken(Clock(), cost)
    assert seen.count((0, LONGEST)) == seen.count((8, 0)) == seen.count((LONGEST, 0)) == 1
    assert seen.count((0, 0)) == seen.count((0, 3)) > 10


def test_numbers_of_rows_without_memory_are_left_out(tmp_path, monkeypatch):
    target, draft = model(), model(d_ff=4)
    tokens = SOURCE, PAST + LONGEST + 1
    some = sum(m.cache_memory(3, *tokens) + m.encoder_memory(1, SOURCE) for m in (target, draft))
    monkeypatch.setattr(memory, "limit", lambda: mx.get_active_memory() + some)
    # What rows will write counts when they join, not here.
    settings = Settings(max_tokens=10**9)
    measured = measure_costs(target, draft, [1, 3, 1000], settings, tmp_path).measured
    assert [costs.rows for costs in measured] == [1, 3]
    monkeypatch.setattr(memory, "limit", lambda: 0)
    assert measure_costs(target, draft, [1, 3], settings, tmp_path) is None


def test_without_costs_auto_decodes_all_the_same(monkeypatch):
    monkeypatch.setattr("decoder.measure_costs", lambda *_: None)
    decoder = SpeculativeDecoder(model(), model(d_ff=4), num_draft="auto")
    stats = decoder.generate([3, 4], max_tokens=9, min_tokens=9).stats
    assert stats.speculation.steps_by_length[5] > 0


def test_what_was_measured_on_a_busy_machine_is_measured_again(tmp_path):
    busy, idle = Clock(), Clock()
    busy.tick, idle.tick = 0.01, 0.001
    first = measure_costs(model(), None, [1], None, tmp_path, busy)
    second = measure_costs(model(), None, [1], None, tmp_path, idle)
    assert first.measured[0].regular == pytest.approx(0.01)
    assert second.measured[0].regular == pytest.approx(0.001)
    assert measure_costs(model(), None, [1], None, tmp_path, busy) == second


def test_where_steps_take_long_what_is_stored_is_not_measured_again(tmp_path):
    slow, idle = Clock(), Clock()
    slow.tick, idle.tick = 0.1, 0.001
    first = measure_costs(model(), None, [1], None, tmp_path, slow)
    assert measure_costs(model(), None, [1], None, tmp_path, idle) == first
    assert idle.now == 0.0


def test_a_step_is_timed_as_the_engine_makes_it(monkeypatch):
    passes = []
    decode = T5.decode

    def watched(self, tokens, cache, offsets):
        passes.append((self.config.d_ff, tokens.shape))
        return decode(self, tokens, cache, offsets)

    seconds = timer(model(), model(d_ff=4), 3, Settings(temp=1.0), Clock())
    monkeypatch.setattr(T5, "decode", watched)
    seconds(0, 5)
    assert passes == [(8, (3, 6))]
    passes.clear()
    seconds(4, 0)
    # The draft has read all that was written but the last token, as while decoding.
    assert passes == [(4, (3, 1))] * 4 + [(8, (3, 5))]
    again = list(passes)
    passes.clear()
    seconds(4, 0)
    # Nothing was committed, so the same step can be made as often as needed.
    assert [shape for d_ff, shape in passes if d_ff == 8] == [again[-1][1]]


def test_choosing_proposals_is_part_of_what_they_cost(monkeypatch):
    clock = Clock()

    def slow(engine):
        clock.now += 5.0
        return [], []

    seconds = timer(model(), model(d_ff=4), 2, Settings(), clock)
    monkeypatch.setattr(calibration.Engine, "choose", slow)
    assert [seconds(*plan) for plan in ((0, 0), (0, 3), (3, 0))] == [0.0, 5.0, 5.0]


def test_what_the_key_depends_on(monkeypatch):
    def half():
        other = model()
        other.set_dtype(mx.float16)
        return other

    plain, greedy = model(), Settings()
    keys = [
        identity(plain, None, 1, greedy),
        identity(plain, None, 2, greedy),
        identity(plain, None, 1, Settings(temp=0.5)),
        identity(plain, None, 1, Settings(temp=0.5, top_k=3)),
        identity(plain, None, 1, Settings(temp=0.5, top_p=0.9)),
        identity(plain, plain, 1, greedy),
        identity(model(d_ff=4), None, 1, greedy),
        identity(half(), None, 1, greedy),
    ]
    monkeypatch.setattr(calibration, "device_name", lambda: "another device")
    keys += [identity(plain, None, 1, greedy)]
    monkeypatch.setattr(calibration, "FORMAT", 99)
    keys += [identity(plain, None, 1, greedy)]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    again = identity(model(), None, 1, Settings(max_tokens=5))
    assert again == identity(plain, None, 1, greedy)
    assert again["mlx"] == mx.__version__


def test_what_is_written_can_be_read(tmp_path):
    file = tmp_path / "new" / "folder" / "curve.json"
    calibration.write(file, KEY, COSTS)
    assert calibration.read(file, KEY) == COSTS
    assert calibration.read(file, {"device": "another"}) is None
    assert calibration.read(tmp_path / "nothing.json", KEY) is None
    assert os.listdir(file.parent) == ["curve.json"]


def damaged(**changes):
    return {"rows": 1, "draft": 0.5, "verify": [1.0] * (LONGEST + 1), "start": 0.0} | changes


@pytest.mark.parametrize(
    "costs",
    [
        [],
        5,
        damaged(rows=1.0).values(),
        damaged(draft=-0.5).values(),
        damaged(draft=None).values(),
        damaged(start=-0.5).values(),
        damaged(verify=[1.0] * LONGEST).values(),
        damaged(verify=[0.0] * (LONGEST + 1)).values(),
        damaged(verify=[1.0] * LONGEST + [0.5]).values(),
        damaged(verify=[1.0] * LONGEST + [float("nan")]).values(),
        damaged(verify=[1.0] * LONGEST + [float("inf")]).values(),
        damaged(verify=[1.0] * LONGEST + ["2.0"]).values(),
        damaged(verify=7).values(),
    ],
)
def test_damaged_costs_are_not_used(tmp_path, costs):
    file = tmp_path / "costs.json"
    costs = list(costs) if not isinstance(costs, int) else costs
    file.write_text(json.dumps({"key": KEY, "costs": costs}))
    assert calibration.read(file, KEY) is None
    file.write_text(json.dumps({"key": KEY, "costs": list(damaged().values())}))
    assert calibration.read(file, KEY).draft == 0.5


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_a_damaged_file_is_measured_anew(tmp_path, data):
    measure_costs(model(), None, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(data)
    measure_costs(model(), None, folder=tmp_path)
    assert json.loads(file.read_bytes()).keys() == json.loads(good).keys()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    assert measure_costs(model(), None, folder=blocked / "folder").of(1).regular > 0
    assert blocked.read_text() == ""


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "curve.json"
    calibration.write(file, KEY, COSTS)

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(calibration.os, "replace", fail)
    calibration.write(file, KEY, StepCosts(1, 9.0, (9.0,)))
    monkeypatch.undo()
    assert calibration.read(file, KEY) == COSTS
    assert os.listdir(tmp_path) == ["curve.json"]


def test_the_cache_folder():
    assert str(cache_folder({"XDG_CACHE_HOME": "/c"})) == "/c/t5-mlx"
    for environment in ({}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(environment) == calibration.Path.home() / ".cache" / "t5-mlx"
