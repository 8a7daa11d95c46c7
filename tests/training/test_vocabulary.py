"""Tests the vocabulary of a draft: counted, sorted and cut to the needed size."""

import numpy as np
import pytest

from mlx_t5.training import vocabulary
from mlx_t5.training.vocabulary import by_frequency, chosen, coverage, smallest

ANSWERS = [(7, 7, 7, 5, 1), np.array([5, 9, 5, 9, 7, 1]), (3, 99)]


def test_the_end_tokens_come_first_then_the_most_frequent_and_of_equals_the_lowest_id():
    order = by_frequency(ANSWERS, [2, 1, 50], 12)
    assert order.tolist() == [1, 2, 7, 5, 9, 3, 0, 4, 6, 8, 10, 11]


def test_the_smallest_multiple_that_covers_other_answers_is_used(monkeypatch):
    monkeypatch.setattr(vocabulary, "STEP", 2)
    order = np.array([1, 7, 5, 9, 3, 0])
    rare = [(1, 7) * 99 + (5,), (7, 1)]  # 200 tokens, and one that is not among the first two
    assert smallest(order, rare) == 2 and coverage(order[:2], rare) == pytest.approx(200 / 201)
    assert smallest(order, [*rare, (9,)]) == 4
    assert smallest(order, [(0,)]) == smallest(order, [(77,)]) == 6  # all
    assert smallest(order, []) == 2 and coverage(order, []) == 1


def test_a_given_size_is_used_and_its_share_is_logged():
    lines, order = [], by_frequency(ANSWERS, [1], 1000)
    ids = chosen(order, [(7, 3)], 3, lines.append)
    assert ids.tolist() == [1, 5, 7] and "3 of 1,000 tokens: 50.0% of what" in lines[0]
    assert chosen(order, [(7, 3)], None, lines.append).tolist() == list(range(1000))
