"""Tests sums over the statistics of texts."""

import pytest

from mlx_t5.engine.rows import Result, Speculation, Stats, total


def result(drafted, accepted, calls, decided):
    """Returns a text with equally many proposals a step, accepted in the first place only."""
    positions = Speculation(
        drafted_by_position=[calls] * (drafted // calls), accepted_by_position=[accepted]
    )
    stats = Stats(target_calls=calls, tokens_per_call=decided / calls, speculation=positions)
    stats.drafted, stats.accepted = drafted, accepted
    return Result(None, [], [], "stop", stats)


def test_counts_add_up():
    stats = total([result(4, 3, 4, 7), result(4, 1, 2, 3)])
    assert (stats.target_calls, stats.decided, stats.drafted, stats.accepted) == (6, 10, 8, 4)
    speculation = stats.speculation
    assert speculation.drafted_by_position == [6, 2] and speculation.accepted_by_position == [4]
    assert (stats.acceptance_rate, stats.tokens_per_call) == (4 / 8, 10 / 6)
    assert speculation.alpha == pytest.approx(4 / 8)  # 6 first and 2 second proposals
    nothing = total([result(0, 0, 3, 3)])
    assert (nothing.drafted, nothing.tokens_per_call, nothing.speculation.alpha) == (0, 1.0, 0.0)


def alpha(drafted, accepted):
    return Speculation(drafted_by_position=drafted, accepted_by_position=accepted).alpha


def test_alpha_counts_each_proposal_up_to_the_first_that_is_refused():
    # Steps of 3 proposals that kept 3, 1 and 0 judged 3, 2 and 1 proposals.
    assert alpha([3, 3, 3], [2, 1, 1]) == 4 / 6
    # One step keeps its only proposal, and another keeps one of two.
    assert alpha([2, 1], [2, 0]) == 2 / 3
