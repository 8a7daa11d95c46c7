"""Sums over the statistics of texts."""

import pytest

from mlx_t5.drafting.tally import Tally
from mlx_t5.engine.rows import Result, Speculation, Stats


def result(drafted, accepted, calls, decided):
    """A text whose steps proposed as many as each other, and accepted at the first place only."""
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
    assert tally.alpha == pytest.approx(4 / 8)  # six first proposals and two second ones
    nothing = Tally.of([result(0, 0, 3, 3)])
    assert (nothing.acceptance, nothing.tokens_per_call, nothing.alpha) == (None, 1.0, 0.0)
