"""What passes cost: which are measured, in what time, and what follows for others."""

import math

import pytest

from fake_model import FakeModel, random_table
from mlx_t5.backend import mx
from mlx_t5.drafting import costs
from mlx_t5.drafting.adaptive import Adaptive
from mlx_t5.drafting.costs import (
    BUDGET_SECONDS,
    CHAIN,
    DRAFT_POINTS,
    LONGEST,
    NEEDED,
    TARGET_POINTS,
    Costs,
    ladder,
    measure,
    rising,
)
from published_costs import PUBLISHED, T5_11B, T5_LARGE


class Machine:
    """Passes that take a given time; the first of a shape compiles its kernels as well."""

    def __init__(self, takes, compiling=0.1):
        self.takes, self.compiling, self.passes, self.spent = takes, compiling, [], 0.0

    def seconds(self, positions):
        compiling = 0.0 if positions in self.passes else self.compiling
        self.passes.append(positions)
        self.spent += self.takes(positions)
        return self.takes(positions) + compiling


def test_every_shape_runs_once_before_it_counts():
    machine = Machine(lambda n: 0.001 * (1 + n // 6))
    measured = ladder(machine.seconds, TARGET_POINTS, BUDGET_SECONDS)
    assert sorted(TARGET_POINTS) == list(measured)
    assert measured == pytest.approx({n: 0.001 * (1 + n // 6) for n in measured})
    assert machine.spent <= BUDGET_SECONDS


def test_a_slow_model_is_measured_at_what_matters_most():
    machine = Machine(lambda n: 1.0 + 0.1 * n)
    measured = ladder(machine.seconds, TARGET_POINTS, BUDGET_SECONDS)
    assert set(measured) == set(TARGET_POINTS[:NEEDED])
    assert len(machine.passes) == 2 * NEEDED


def test_more_positions_never_cost_less():
    noise = iter([3.0, 1.0, 2.0] * 1000)
    machine = Machine(lambda n: 0.001 * next(noise))
    measured = ladder(machine.seconds, TARGET_POINTS, BUDGET_SECONDS)
    costs = rising(measured)
    assert list(costs) == list(measured) != sorted(measured.values())
    assert list(costs.values()) == sorted(costs.values())
    assert max(costs.values()) == max(measured.values())


def test_between_and_beyond_what_was_measured():
    measured = Costs({1: 1.0, 5: 3.0, 9: 9.0}, {1: 0.5, 4: 0.8})
    assert measured.verify(1, 5) == 3.0
    assert measured.verify(1, 3) == 2.0
    assert measured.verify(2, 4) == pytest.approx(7.5)
    assert measured.verify(4, 4) == pytest.approx(16.0), "on average 1 a position"
    assert measured.draft_pass(1) == 0.5
    assert measured.draft_pass(7) == pytest.approx(1.1)
    assert Costs({1: 1.0}, {}).draft_pass(3) == 0.0
    assert Costs({1: 1.0}, {}).verify(3, 4) == 1.0


def test_a_pair_is_measured_without_leaving_anything_behind(monkeypatch):
    monkeypatch.setattr(costs, "BUDGET_SECONDS", 0.0)
    model = FakeModel(random_table(5), 5)
    measured = measure(model, model)
    assert list(measured.target) == sorted(TARGET_POINTS[:NEEDED])
    assert list(measured.draft) == sorted(DRAFT_POINTS)
    assert measure(model, None).draft == {}
    assert min(measured.draft.values()) > 0


def test_passes_are_timed_as_a_step_makes_them():
    """The target's over all positions, to what the host waits for; a draft's in a chain of some."""
    model, clock = FakeModel(random_table(5), 5), iter([10.0, 18.0, 20.0, 28.0])
    assert costs.timer(model, lambda: next(clock))(5) == 8.0
    assert model.calls == [([0], [[0] * 5])]
    model.calls.clear()
    assert costs.drafting(model, lambda: next(clock))(4) == 8.0 / CHAIN
    assert [offsets for offsets, _ in model.calls] == [[i] * 4 for i in range(CHAIN)]


def test_auto_stays_within_the_vector_kernel_of_metal(monkeypatch):
    for metal, cpu, most in ((True, False, 7), (True, True, 15), (False, False, 15)):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        monkeypatch.setattr(costs, "on_cpu", lambda cpu=cpu: cpu)
        assert costs.longest() == most
        adaptive = Adaptive(lambda: Costs({1: 1.0, 64: 1.0}, {1: 0.0}), ["draft"])
        adaptive.learn((), "draft", 1000, 1000)
        assert adaptive.limits((), 1) == {"draft": most}


# ---- published ladders ---------------------------------------------------------------------------


def chosen(costs, alpha, kind="draft"):
    """What `auto` proposes where this share is kept."""
    adaptive = Adaptive(lambda: costs, [kind], LONGEST)
    adaptive.learn((), kind, 100_000, round(alpha * 100_000))
    return adaptive.limits((), 1).get(kind, 0)


def test_without_a_draft_pass_to_pay_for_copies_pay_where_they_mostly_hold():
    each = Costs(PUBLISHED["4 bits, every row by itself"], {})
    assert [chosen(each, alpha, "copy") for alpha in (0.4, 0.75, 0.95)] == [0, 0, LONGEST]


# Staircases with their steps where the kernels have them: see costs.py.
KERNELS = {
    "4 bits, M3 and later": lambda m: min(math.ceil(m / 5) + 0.1 * m, 4.0),
    "bf16, M3 and later": lambda m: min(0.5 * math.ceil(m / 5) + 0.02 * m + 0.48, 2.3),
    "bf16, M1 and M2": lambda m: 1.0 if m == 1 else 2 + 0.01 * m,
    "4 bits, M1 and M2": lambda m: 0.1 + 0.9 * m if m < 6 else 5.0,
    "4 bits, M1 Ultra and M2 Ultra": lambda m: 0.1 + 0.8 * m if m < 12 else 8.9,
    "one step at 10": lambda m: 1.0 if m <= 10 else 2.0,
    "one step at 12": lambda m: 1.0 if m <= 12 else 2.0,
    "one step at 15": lambda m: 1.0 if m <= 15 else 2.0,
}


def speed_up(passes, c, alpha, gamma):
    """S(gamma), by the formula."""
    cost = gamma * c + passes(gamma + 1) / passes(1)
    return sum(alpha**i for i in range(gamma + 1)) / cost


@pytest.mark.parametrize("c", [T5_11B, T5_LARGE])
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_points_that_are_measured_tell_as_much_as_all(kernels, c):
    passes = KERNELS[kernels]
    every = Costs({m: passes(m) for m in range(1, LONGEST + 2)}, {1: c * passes(1)})
    fast = rising(ladder(lambda m: 1e-4 * passes(m), TARGET_POINTS, BUDGET_SECONDS))
    slow = rising(ladder(passes, TARGET_POINTS, BUDGET_SECONDS))  # in seconds
    assert list(fast) == sorted(TARGET_POINTS) and list(slow) == sorted(TARGET_POINTS[:NEEDED])
    for alpha in (0.4, 0.6, 0.75, 0.85, 0.95):
        best = chosen(every, alpha)
        assert chosen(Costs(fast, {1: c * fast[1]}), alpha) == best
        if not kernels.startswith("one step"):
            hasty = chosen(Costs(slow, {1: c * slow[1]}), alpha)
            fastest = speed_up(passes, c, alpha, best)
            assert speed_up(passes, c, alpha, hasty) >= 0.85 * fastest
