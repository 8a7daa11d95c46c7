"""Tests the verdict on numbers that can be checked by hand."""

import pytest

from mlx_t5.timing import Ratio
from mlx_t5.training.verdict import LOOKUP, Proposer, advice


def proposer(name, speed, acceptance=0.8):
    return Proposer(name, acceptance, 4.2, Ratio(speed, speed, speed))


@pytest.mark.parametrize(
    ("proposers", "begins"),
    [
        ([("new", 2.0), ("old", 1.5)], "recommended: --draft-model new, 2.00 (2.00"),
        ([("new", 2.0), ("old", 1.97)], "keep what you have: "),  # the new one is no faster
        ([("new", 1.01)], "keep --draft-model none"),
        ([("new", 1.5), (LOOKUP, 2.0)], "keep to copying, without"),
        # A proposer without accepted tokens is faster by chance.
        ([("new", 2.0, 0.0)], "keep --draft-model none"),
        ([("new", 2.0, None), ("old", 1.5)], "keep what you have: "),
    ],
)
def test_the_verdict_recommends_the_fastest_draft(proposers, begins):
    assert advice([proposer(*one) for one in proposers], "new").startswith(begins)
