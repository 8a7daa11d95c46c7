"""What passes cost: which are measured, in what time, and what follows for others."""

import pytest

from fake_model import FakeModel, random_table
from mlx_t5.backend import mx
from mlx_t5.drafting import costs
from mlx_t5.drafting.adaptive import Adaptive
from mlx_t5.drafting.costs import (
    BUDGET_SECONDS,
    CHAIN,
    DRAFT_POINTS,
    NEEDED,
    TARGET_POINTS,
    Costs,
    ladder,
    measure,
    rising,
)


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


def test_drafts_are_timed_as_they_are_made(monkeypatch):
    """A chain by the step that drafts take, each fed what the last has chosen, and one wait."""
    model, rows, handed = FakeModel(random_table(5), 5), 4, []
    steps, clock = [], iter([10.0, 18.0])

    class Step:
        def __init__(self, draft):
            assert draft is model

        def __call__(self, tokens, cache, offsets):
            logits = model.decode(tokens, cache, offsets)
            steps.append((tokens.tolist(), offsets, mx.argmax(logits, axis=-1).tolist()))
            return logits

    monkeypatch.setattr(costs, "CompiledStep", Step)
    monkeypatch.setattr(mx, "async_eval", handed.append)
    assert costs.drafting(model, lambda: next(clock))(rows) == 8.0 / CHAIN
    fed, offsets, chosen = zip(*steps, strict=True)
    assert offsets == tuple([i] * rows for i in range(CHAIN))
    assert fed[0] == [[0]] * rows and fed[1:] == chosen[:-1]
    assert [a.tolist() for a in handed if isinstance(a, mx.array)] == list(chosen)


def test_auto_stays_within_the_vector_kernel_of_metal(monkeypatch):
    for metal, cpu, most in ((True, False, 7), (True, True, 15), (False, False, 15)):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        monkeypatch.setattr(costs, "on_cpu", lambda cpu=cpu: cpu)
        assert costs.longest() == most
        adaptive = Adaptive(lambda: Costs({1: 1.0, 64: 1.0}, {1: 0.0}), ["draft"])
        adaptive.learn((), "draft", 1000, 1000)
        assert adaptive.limits((), 1) == {"draft": most}
