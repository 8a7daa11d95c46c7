"""Formulas, estimates and choices on literals."""

import pytest

from draft_length import (
    WORTH,
    Costs,
    Curve,
    Estimate,
    Outlook,
    best_lengths,
    break_even,
    expected_tokens,
)

CURVE = Curve(((1, 2.0), (5, 4.0), (9, 4.0)))


def speedup(alpha, gamma, c, v):
    """S(gamma) of one row, from the paper's symbols; v stands for v(gamma + 1) / v(1)."""
    return expected_tokens(alpha, gamma) / (gamma * c + v)


@pytest.mark.parametrize(
    ("alpha", "gamma", "tokens"),
    [(0.0, 7, 1.0), (0.5, 1, 1.5), (0.5, 2, 1.75), (0.8, 0, 1.0), (1.0, 4, 5.0)],
)
def test_expected_tokens(alpha, gamma, tokens):
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens)
    # A step yields one token more each time one more proposal in a row is kept.
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)))


def test_speedup_is_the_formula_of_the_paper():
    # Table 1 of the paper: alpha 0.8 and gamma 5 with c = 0 makes 3.69 tokens a pass.
    assert speedup(0.8, 5, 0.0, 1.0) == pytest.approx(3.69, abs=0.005)
    assert speedup(0.8, 5, 0.1, 1.5) == pytest.approx((1 - 0.8**6) / (0.2 * (5 * 0.1 + 1.5)))
    assert speedup(0.6, 0, 0.3, 1.0) == 1.0


@pytest.mark.parametrize(
    ("positions", "seconds"), [(1, 2.0), (2, 2.5), (4, 3.5), (5, 4.0), (7, 4.0), (9, 4.0)]
)
def test_between_two_points_costs_rise_evenly(positions, seconds):
    assert CURVE.at(positions) == seconds


def test_beyond_the_last_point_costs_rise_as_before_it_and_never_fall():
    assert CURVE.at(100) == 4.0
    assert Curve(((1, 1.0), (3, 2.0))).at(7) == 4.0
    assert Curve(((1, 1.0), (3, 0.5))).at(9) == 0.5
    assert Curve(((1, 1.0),)).at(9) == 1.0


def test_costs_of_a_step():
    costs = Costs(CURVE, Curve(((1, 0.5), (3, 1.5)))).of(rows=2, longest=3)
    assert costs.verify == (2.5, 3.5, 4.0, 4.0)
    assert costs.draft == 1.0
    assert costs.step(0) == 2.5
    assert costs.step(2) == 2 * 1.0 + 4.0
    assert costs.step(1, 3) == 1.0 + 4.0
    assert costs.catch_up(3) == 3.0
    assert Costs(CURVE).of(1).step(4, 0) == 4.0


def test_an_estimate_counts_up_to_the_first_refusal():
    estimate = Estimate(memory=1e9)
    estimate.add(4, 2)  # two kept, one refused, the last not judged
    estimate.add(3, 3)
    estimate.add(0, 0)
    assert (estimate.judged, estimate.kept) == (pytest.approx(6), pytest.approx(5))
    assert estimate.alpha(0.5, 0.0) == pytest.approx(5 / 6)
    assert estimate.alpha(0.5, 2.0) == pytest.approx(6 / 8)
    assert Estimate(9).alpha(0.7, 2.0) == 0.7


def test_an_estimate_forgets():
    estimate = Estimate(memory=10)
    for _ in range(100):
        estimate.add(1, 1)
    assert estimate.judged == pytest.approx(10, rel=1e-3)
    for _ in range(10):
        estimate.add(1, 0)
    assert estimate.alpha(0.0, 0.0) == pytest.approx(0.9**10, rel=1e-3)
    estimate.doubt()
    assert estimate.judged == pytest.approx(5, rel=1e-3)


def row(alpha, room=99, free=False):
    return Outlook(alpha, room, free)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.9, 1.0])
def test_the_choice_for_one_row_maximises_the_formula(alpha):
    curve = Curve(tuple((n, 1 + 0.4 * ((n - 1) // 5) + 0.01 * n) for n in range(1, 17)))
    costs = Costs(curve, Curve(((1, 0.1),))).of(1)
    v = costs.verify
    by_formula = [speedup(alpha, g, 0.1 / v[0], v[g] / v[0]) for g in range(16)]
    draft, copy, s = best_lengths([row(alpha)], costs)
    if max(by_formula) < WORTH:
        assert (draft, s) == (0, 1.0)
    else:
        assert draft == by_formula.index(max(by_formula)) > 0
        assert s == pytest.approx(max(by_formula))
    assert copy == 0


def test_rows_share_one_length_that_is_best_for_all_of_them():
    costs = Costs(Curve(((1, 1.0), (100, 10.9))), Curve(((1, 0.05),))).of(2)
    good, bad, both = (
        best_lengths(rows, costs) for rows in ([row(0.9)], [row(0.1)], [row(0.9), row(0.1)])
    )
    assert bad[0] < both[0] < good[0]
    lengths = [
        (expected_tokens(0.9, g) + expected_tokens(0.1, g)) / 2 * costs.verify[0] / costs.step(g)
        for g in range(16)
    ]
    assert both[0] == lengths.index(max(lengths))


def test_no_more_is_chosen_than_rows_can_use():
    costs = Costs(Curve(((1, 1.0), (16, 1.2))), Curve(((1, 0.01),))).of(1)
    assert best_lengths([row(1.0, room=3)], costs)[0] == 3
    assert best_lengths([row(1.0, room=0)], costs)[0] == 0


def test_copied_proposals_may_be_more_than_drafted_ones_and_never_fewer():
    costs = Costs(Curve(((1, 1.0), (64, 1.5))), Curve(((1, 0.02),))).of(2)
    draft, copy, _ = best_lengths([row(0.7), row(0.95, free=True)], costs)
    assert 0 < draft < copy
    assert best_lengths([row(0.95, free=True)], costs)[0] == 0


def test_where_every_position_costs_as_much_as_a_pass_nothing_is_worth_it():
    costs = Costs(Curve(((1, 1.0), (16, 16.0))), Curve(((1, 0.1),))).of(1)
    assert best_lengths([row(1.0)], costs) == (0, 0, 1.0)
    assert break_even(costs, False) is None


def test_break_even():
    costs = Costs(Curve(((1, 1.0), (2, 1.1), (16, 16.0))), Curve(((1, 0.1),))).of(1)
    needed = break_even(costs, False)
    # One proposal: (1 + alpha) / 1.2 reaches WORTH.
    assert needed == pytest.approx(1.2 * WORTH - 1, abs=0.002)
    assert best_lengths([row(needed)], costs)[0] == 1
    assert best_lengths([row(needed - 0.01)], costs)[0] == 0
    assert break_even(costs, True) == pytest.approx(1.1 * WORTH - 1, abs=0.002)
