"""Tests sums over the statistics of texts."""

import pytest

from mlx_t5.engine.rows import Result, Speculation, Stats, Tally


def result(drafted, accepted, calls, decided):
    """Returns a text with equally many proposals a step, accepted in the first place only."""
    positions = Speculation(
        drafted_by_position=[calls] * (drafted // calls), accepted_by_position=[accepted]
    )
    stats = Stats(target_calls=calls, tokens_per_call=decided / calls, speculation=positions)
    stats.drafted, stats.accepted = drafted, accepted
    return Result(None, [], [], "stop", stats)


def test_counts_add_up():
    tally = Tally.of([result(4, 3, 4, 7), result(4, 1, 2, 3)])
    assert tally == Tally(6, 10, 8, 4, [6, 2], [4])
    assert (tally.acceptance, tally.tokens_per_call) == (4 / 8, 10 / 6)
    assert tally.alpha == pytest.approx(4 / 8)  # 6 first and 2 second proposals
    nothing = Tally.of([result(0, 0, 3, 3)])
    assert (nothing.acceptance, nothing.tokens_per_call, nothing.alpha) == (None, 1.0, 0.0)


def test_alpha_counts_each_proposal_up_to_the_first_that_is_refused():
    # Steps of 3 proposals that kept 3, 1 and 0 judged 3, 2 and 1 proposals.
    assert Tally(3, 7, 9, 4, [3, 3, 3], [2, 1, 1]).alpha == 4 / 6
    # One step keeps its only proposal, and another keeps one of two.
    assert Tally(2, 4, 3, 2, [2, 1], [2, 0]).alpha == 2 / 3
