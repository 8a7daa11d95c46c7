"""Formulas, estimates and choices on literals."""

import numpy as np
import pytest

from draft_length import (
    LONGEST,
    WORTH,
    Costs,
    Estimate,
    StepCosts,
    best_for_one,
    best_lengths,
    expected_tokens,
    foresee,
    gains,
    judge,
    usual_for_one,
)

NONE = (0.0, 0)
FLAT = StepCosts(1, 0.05, tuple(1 + 0.01 * n for n in range(LONGEST + 1)))
STAIRCASE = StepCosts(1, 0.1, tuple(1 + 0.4 * (n // 5) + 0.01 * n for n in range(LONGEST + 1)))


def speedup(alpha, gamma, c, v):
    """S(gamma) of one row, from the paper's symbols; v stands for v(gamma + 1) / v(1)."""
    return expected_tokens(alpha, gamma) / (gamma * c + v)


def row(alpha, room=LONGEST):
    return alpha, room


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


def test_no_more_is_gained_than_there_is_room_for():
    half, sure, none = gains([(0.5, 2), (1.0, LONGEST), NONE])
    np.testing.assert_allclose(half, [1, 1.5, 1.75, *[1.75] * (LONGEST - 2)])
    np.testing.assert_allclose(sure, range(1, LONGEST + 2))
    np.testing.assert_allclose(none, np.ones(LONGEST + 1))


def test_costs_of_a_step():
    costs = StepCosts(2, 0.5, (2.0, 3.0, 4.0))
    assert costs.regular == 2.0
    # Rows: drafted; columns: copied. Both are verified together.
    np.testing.assert_allclose(costs.table, [[2, 3, 4], [3.5, 3.5, 4.5], [5, 5, 5]])
    started = StepCosts(2, 0.5, (2.0, 3.0, 4.0), 0.25)
    np.testing.assert_allclose(started.table, [[2, 3, 4], [3.75, 3.75, 4.75], [5.25, 5.25, 5.25]])
    assert costs.price == "c 0.25, v(2)/v(1) 1.50"


def test_between_two_numbers_of_rows_costs_lie_on_a_line():
    one, five = StepCosts(1, 0.1, (1.0, 2.0), 0.5), StepCosts(5, 0.3, (3.0, 6.0), 0.7)
    costs = Costs((one, five))
    assert costs.of(1) == one
    assert costs.of(3) is costs.of(3)
    three = costs.of(3)
    assert (three.rows, three.draft, three.start) == (3, *map(pytest.approx, (0.2, 0.6)))
    assert three.verify == pytest.approx((2.0, 4.0))
    assert costs.of(9).verify == pytest.approx((5.0, 10.0))
    assert Costs((one,)).of(1) == one
    # A wrong measurement does not make larger batches free.
    falling = Costs((five, StepCosts(6, 0.1, (2.0, 4.0)))).of(20)
    assert (falling.draft, *falling.verify) == (0.1, 2.0, 4.0)


def test_what_was_measured_for_one_row_alone_is_taken_to_depend_on_positions():
    one = StepCosts(1, 0.25, (1.0, 3.0, 4.0, 4.0), 0.5)
    # Passes over 2, 4, 6 and 8 positions; beyond what was measured each costs 1, as on average.
    assert Costs((one,)).of(2) == StepCosts(2, 0.75, (3.0, 4.0, 6.0, 8.0), 1.5)
    assert StepCosts(4, 0.25, (1.0, 3.0, 4.0, 4.0)).scaled(2).verify == (1.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("proposed", "accepted", "written", "ended", "counts"),
    [
        (5, 5, 6, False, (5, 5)),  # all kept
        (5, 2, 3, False, (3, 2)),  # the third refused, the others not judged
        (5, 0, 1, False, (1, 0)),
        (0, 0, 1, False, (0, 0)),
        (5, 2, 3, True, (3, 2)),  # the target ended the text
        (8, 4, 4, True, (4, 3)),  # an accepted end token: the four behind it were of no use
        (4, 4, 4, True, (3, 3)),  # nothing was behind it
    ],
)
def test_what_a_step_tells(proposed, accepted, written, ended, counts):
    assert judge(proposed, accepted, written, ended) == counts


@pytest.mark.parametrize(
    ("offered", "written", "ended", "counts"),
    [
        ((7, 8, 9), [7], False, (1, 1)),
        ((7, 8, 9), [7, 8, 5], False, (3, 2)),
        ((7, 8, 9), [6, 8, 9], False, (1, 0)),
        ((7,), [7, 8], False, (1, 1)),
        ((), [7, 8], False, (0, 0)),
        ((7, 1), [7, 1], True, (1, 1)),
        ((7, 8), [1], True, (0, 0)),
    ],
)
def test_what_would_have_become_of_other_tokens(offered, written, ended, counts):
    assert foresee(offered, written, ended) == counts


def test_an_estimate_weighs_a_prior():
    estimate = Estimate(memory=1e9)
    estimate.add(3, 2)
    estimate.add(3, 3)
    assert (estimate.judged, estimate.kept) == (pytest.approx(6), pytest.approx(5))
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


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.9, 1.0])
def test_the_choice_for_one_row_maximises_the_formula(alpha):
    v = STAIRCASE.verify
    by_formula = [speedup(alpha, g, 0.1 / v[0], v[g] / v[0]) for g in range(LONGEST + 1)]
    expected = by_formula.index(max(by_formula)) if max(by_formula) >= WORTH else 0
    assert best_lengths([row(alpha)], [NONE], STAIRCASE)[0] == expected


@pytest.mark.parametrize("costs", [FLAT, STAIRCASE])
@pytest.mark.parametrize("draft", [(0.0, 0), (0.3, 9), (0.7, 3), (0.7, LONGEST), (0.95, LONGEST)])
@pytest.mark.parametrize("copy", [(0.0, 0), (0.1, 5), (0.7, LONGEST), (0.97, 4), (0.9, LONGEST)])
def test_the_look_up_for_one_row_says_the_same(draft, copy, costs):
    found = best_for_one(draft, copy, costs)
    assert found == best_lengths([draft], [copy], costs)


@pytest.mark.parametrize("costs", [FLAT, STAIRCASE])
def test_rows_together_gain_no_more_than_each_would_alone(costs):
    outlooks = [(a, r) for a in (0.0, 0.05, 0.1, 0.2, 0.5) for r in (0, 1, LONGEST)]
    for first in outlooks:
        for second in outlooks:
            drafts, copies = [first, second], [second, first]
            best = best_lengths(drafts, copies, costs)
            if best != (0, 0):
                assert sum(map(costs.most, drafts, copies)) >= 2 * WORTH - 1e-9
            alone = best_lengths([first], [second], costs)
            assert (costs.most(first, second) >= WORTH) == (alone != (0, 0))


@pytest.mark.parametrize("choose", ["looked up", "by arrays", "by lists"])
def test_the_last_choice_stands_until_another_promises_clearly_more(choose):
    def chosen(alpha, last, copied=0.0):
        # In lists, only the better kind is offered.
        offered = [choose != "by lists" or a == max(alpha, copied) for a in (alpha, copied)]
        draft, copy = ((a, LONGEST * on) for a, on in zip((alpha, copied), offered, strict=True))
        if choose == "looked up":
            return best_for_one(draft, copy, FLAT, last)
        return best_lengths([draft], [copy], FLAT, last)

    best = chosen(0.8, (0, 0))[0]
    assert chosen(0.8, (best + 1, 0)) == (best + 1, 0)
    assert chosen(0.8, (1, 0)) == (best, 0)
    assert chosen(0.0, (best, 0)) == (0, 0), "nothing is worth it any more"
    copies = chosen(0.1, (0, 0), copied=0.8)[1]
    assert chosen(0.1, (0, copies - 1), copied=0.8) == (0, copies - 1)
    assert chosen(0.8, (0, copies), copied=0.1) == (best, 0)


def test_rows_share_one_length_that_is_best_for_all_of_them():
    steep = StepCosts(2, 0.05, tuple(1 + 0.1 * n for n in range(LONGEST + 1)))
    high, low = row(0.9), row(0.1)
    good, bad, both = (
        best_lengths(rows, [NONE] * len(rows), steep)[0] for rows in ([high], [low], [high, low])
    )
    assert bad < both < good
    assert both == np.argmax(np.sum(gains([high, low]), axis=0) / np.diag(steep.table))


def test_each_row_takes_what_promises_it_more():
    high, low = row(0.9), row(0.3)
    # Copies cost nothing but their place, so where both are as good nothing is drafted …
    assert best_lengths([high], [high], FLAT) == (0, best_lengths([NONE], [high], FLAT)[1])
    # … and two rows that need different ones get both, copies at least as many as drafts.
    draft, copy = best_lengths([high, low], [low, high], FLAT)
    assert 0 < draft < copy


@pytest.mark.parametrize("costs", [FLAT, STAIRCASE])
@pytest.mark.parametrize("kinds", [(True, False), (False, True), (True, True)])
def test_no_other_lengths_promise_more(costs, kinds):
    rng = np.random.default_rng(1)
    for _ in range(30):
        drafts, copies = (
            [(rng.integers(201) / 200, int(rng.integers(16)) * kind) for _ in range(3)]
            for kind in kinds
        )
        promised = {
            (d, k): sum(
                max(expected_tokens(a, min(d, m)), expected_tokens(b, min(k, n)))
                for (a, m), (b, n) in zip(drafts, copies, strict=True)
            )
            / costs.table[d, k]
            for d in range(LONGEST + 1)
            for k in range(LONGEST + 1)
        }
        best = max(promised.values()) * costs.regular / 3
        chosen = promised[best_lengths(drafts, copies, costs)] * costs.regular / 3
        assert chosen == pytest.approx(best if best >= WORTH else 1.0)


def test_no_more_is_chosen_than_rows_can_use():
    assert best_lengths([row(1.0, 3)], [NONE], FLAT)[0] == 3
    assert best_lengths([row(1.0, 0)], [NONE], FLAT) == (0, 0)


def test_where_every_position_costs_as_much_as_a_pass_nothing_is_worth_it():
    linear = StepCosts(1, 0.1, tuple(1.0 + n for n in range(LONGEST + 1)))
    assert best_lengths([row(1.0)], [NONE], linear) == (0, 0)
    assert linear.hopeless
    assert not STAIRCASE.hopeless
    # Up to what is within the error of the promise.
    barely = StepCosts(1, 0.0, (1.0, *[2 / WORTH - 1e-6] + [99.0] * (LONGEST - 1)))
    assert not barely.hopeless
    assert StepCosts(1, 0.0, (1.0, *[2 / WORTH + 1e-6] + [99.0] * (LONGEST - 1))).hopeless


def test_rows_that_do_not_know_of_each_other_draft_while_it_pays_and_need_more_to_copy():
    def usual(cost, draft=(0.0, 0), copy=(0.0, 0)):
        flat = StepCosts(4, 0.0, (1.0,) + (expected_tokens(0.85, LONGEST) / cost,) * LONGEST)
        return usual_for_one(draft, copy, flat)

    good = 0.85, LONGEST
    assert [usual(s, draft=good) for s in (0.99, 1.01)] == [(0, 0), (LONGEST, 0)]
    assert [usual(s, copy=good) for s in (2.45, 2.55)] == [(0, 0), (0, LONGEST)]
    assert usual(2.45, draft=good, copy=good) == (LONGEST, 0), "not enough for copies"
