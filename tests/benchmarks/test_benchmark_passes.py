"""Tests how single passes are timed: which passes, in how much time, and in which form."""

import pytest

from benchmarks.passes import CHAIN, TARGET_POINTS, drafting, ladder, timer
from fake_model import FakeModel, random_table

BUDGET = 0.4  # seconds


class Machine:
    """Passes of given durations; the first pass of a shape also compiles its kernels."""

    def __init__(self, takes, compiling=0.1):
        self.takes, self.compiling, self.passes, self.spent = takes, compiling, [], 0.0

    def seconds(self, positions):
        compiling = 0.0 if positions in self.passes else self.compiling
        self.passes.append(positions)
        self.spent += self.takes(positions)
        return self.takes(positions) + compiling


def test_every_shape_runs_once_before_it_counts():
    machine = Machine(lambda n: 0.001 * (1 + n // 6))
    measured = ladder(machine.seconds, TARGET_POINTS, BUDGET)
    assert sorted(TARGET_POINTS) == list(measured)
    assert measured == pytest.approx({n: 0.001 * (1 + n // 6) for n in measured})
    assert machine.spent <= BUDGET


def test_a_round_on_a_slower_machine_counts_like_the_others():
    """A program that runs for a while slows all passes alike, so ratios do not change."""
    rounds = iter([1.0] * 8 + [5.0] * 4 + [1.0] * 100)
    measured = ladder(lambda n: n * next(rounds), (1, 2, 3, 4), 10_000.0)
    assert measured == pytest.approx({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})


def test_passes_are_timed_as_in_a_decoding_step():
    """A target's pass includes what Python waits for; draft passes are timed as a chain."""
    model, clock = FakeModel(random_table(5), 5), iter([10.0, 18.0, 20.0, 28.0])
    assert timer(model, lambda: next(clock))(5) == 8.0
    assert model.calls == [([0], [[0] * 5])]
    model.calls.clear()
    assert drafting(model, lambda: next(clock))(4) == 8.0 / CHAIN
    assert [offsets for offsets, _ in model.calls] == [[i] * 4 for i in range(CHAIN)]
