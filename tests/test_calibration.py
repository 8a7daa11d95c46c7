"""Measuring with a clock of the test's own, and the file that remembers."""

import json
import os

import pytest

import calibration
from calibration import POSITIONS, cache_folder, identity, measure_costs, sample
from config import T5Config
from draft_length import Curve
from model import T5, mx

SHAPE = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
KEY = {"device": "a test"}
CURVE = Curve(((1, 0.5), (6, 0.75)))


class Clock:
    """Seconds that pass only where the test says so."""

    now = 0.0

    def __call__(self):
        return self.now


def model(**shape):
    return T5(T5Config(**{**SHAPE, **shape}))


def timed(clock, cost):
    def seconds(n):
        clock.now += cost(n)
        return cost(n)

    return seconds


def test_a_small_model_has_every_point_measured():
    clock = Clock()
    curve = sample(timed(clock, lambda n: 1e-4 * n), budget=0.4, clock=clock)
    assert [n for n, _ in curve.points] == sorted(POSITIONS)
    assert curve.at(16) == pytest.approx(16e-4)
    assert clock.now <= 0.4


@pytest.mark.parametrize("cost", [0.01, 0.07, 0.15, 3.0])
def test_a_large_model_gets_by_with_the_first_points(cost):
    clock = Clock()
    curve = sample(timed(clock, lambda n: cost), budget=0.4, clock=clock)
    assert {n for n, _ in curve.points} == set(POSITIONS[: len(curve.points)])
    assert len(curve.points) >= 2
    assert clock.now <= max(0.4, 2 * cost)


def test_the_least_of_several_counts():
    clock, calls = Clock(), []

    def noisy(n):
        calls.append(n)
        return timed(clock, lambda n: 0.001 if len(calls) > 20 else 0.002)(n)

    curve = sample(noisy, budget=0.4, clock=clock)
    assert {s for _, s in curve.points} == {0.001}


def test_fewer_positions_never_cost_more():
    clock = Clock()
    curve = sample(timed(clock, {1: 5.0, 6: 2.0}.get), budget=0.4, clock=clock)
    assert curve.points == ((1, 2.0), (6, 2.0))


def test_measured_once_and_then_read(tmp_path):
    target, draft = model(), model(d_ff=4)
    first = measure_costs(target, draft, tmp_path)
    assert first.target != first.draft
    assert len(list(tmp_path.iterdir())) == 2

    def stopped():
        raise AssertionError("measured again")

    assert measure_costs(target, draft, tmp_path, stopped) == first
    assert measure_costs(target, None, tmp_path, stopped).draft is None
    with pytest.raises(AssertionError, match="measured again"):
        measure_costs(model(d_ff=16), None, tmp_path, stopped)


def test_what_the_key_depends_on(monkeypatch):
    def half():
        other = model()
        other.set_dtype(mx.float16)
        return other

    keys = [identity(model(), 1), identity(model(), 4), identity(model(d_ff=4), 1)]
    keys += [identity(half(), 1)]
    monkeypatch.setattr(calibration, "device_name", lambda: "another device")
    keys += [identity(model(), 1)]
    monkeypatch.setattr(calibration, "FORMAT", 99)
    keys += [identity(model(), 1)]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    assert identity(model(), 1) == identity(model(), 1)
    assert identity(model(), 1)["mlx"] == mx.__version__


def test_what_is_written_can_be_read(tmp_path):
    file = tmp_path / "new" / "folder" / "curve.json"
    calibration.write(file, KEY, CURVE)
    assert calibration.read(file, KEY) == CURVE
    assert calibration.read(file, {"device": "another"}) is None
    assert calibration.read(tmp_path / "nothing.json", KEY) is None
    assert os.listdir(file.parent) == ["curve.json"]


@pytest.mark.parametrize(
    "points",
    [
        [],
        [[1, 0.5]],
        [[2, 0.5], [6, 0.7]],
        [[1, 0.5], [6, -0.7]],
        [[1, 0.5], [6, float("nan")]],
        [[1, 0.5], [6, float("inf")]],
        [[1, 0.5], [6, "0.7"]],
        [[1, 0.5], [1, 0.7]],
        [[1, 0.5], [6]],
        5,
    ],
)
def test_damaged_points_are_not_used(tmp_path, points):
    file = tmp_path / "curve.json"
    file.write_text(json.dumps({"key": KEY, "points": points}))
    assert calibration.read(file, KEY) is None


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_a_damaged_file_is_measured_anew(tmp_path, data):
    costs = measure_costs(model(), None, tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(data)
    measure_costs(model(), None, tmp_path)
    assert json.loads(file.read_bytes()).keys() == json.loads(good).keys()
    assert costs.draft is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    assert len(measure_costs(model(), None, blocked / "folder").target.points) > 1
    assert blocked.read_text() == ""


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "curve.json"
    calibration.write(file, KEY, CURVE)

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(calibration.os, "replace", fail)
    calibration.write(file, KEY, Curve(((1, 9.0), (2, 9.0))))
    monkeypatch.undo()
    assert calibration.read(file, KEY) == CURVE
    assert os.listdir(tmp_path) == ["curve.json"]


def test_the_cache_folder():
    assert str(cache_folder({"XDG_CACHE_HOME": "/c"})) == "/c/t5-mlx"
    for environment in ({}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(environment) == calibration.Path.home() / ".cache" / "t5-mlx"
