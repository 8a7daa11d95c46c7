"""The formulas, on numbers that can be checked by hand."""

import pytest

from benchmarks import theory


def test_expected_tokens():
    assert theory.expected_tokens(0.0, 4) == 1.0
    assert theory.expected_tokens(1.0, 4) == 5.0
    assert theory.expected_tokens(0.5, 2) == 1 + 0.5 + 0.25
    assert theory.expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_speed_up():
    v = {1: 1.0, 3: 1.5}
    assert theory.speed_up(0.5, 2, 0.25, v) == 1.75 / (2 * 0.25 + 1.5)
    # The paper's form: verifying costs what one position does.
    assert theory.speed_up(0.8, 2, 0.1, {3: 1.0}) == pytest.approx((1 - 0.8**3) / 0.2 / 1.2)


def test_costs_of_passes_that_vary():
    widths, v = {1: 2, 3: 4}, {1: 1.0, 3: 1.5}
    assert theory.cost(widths, 8, 0.25, v) == 2 * 1.0 + 4 * 1.5 + 8 * 0.25
    assert theory.promised_tokens(0.5, widths) == 2 * 1 + 4 * 1.75


def test_a_fixed_number_of_proposals_is_a_case_of_passes_that_vary():
    alpha, gamma, c, v = 0.7, 4, 0.2, {5: 1.3}
    ratio = theory.promised_tokens(alpha, {5: 9}) / theory.cost({5: 9}, 9 * gamma, c, v)
    assert ratio == pytest.approx(theory.speed_up(alpha, gamma, c, v))
