"""Every figure of a way of decoding, by the letter."""

from collections import Counter

import pytest

from benchmarks import figures
from benchmarks.costs import PairCosts, Round
from benchmarks.subject import Run
from mlx_t5.engine.rows import Result, Speculation, Stats
from mlx_t5.timing import Ratio, Timed

COSTS = PairCosts({1: 2.0, 3: 3.0}, {1: 1.0, 3: 1.5}, 0.25)


def run(tokens, calls, drafted=(), accepted=(), decode=1.0, widths=(), draft_passes=0):
    """A turn of one prompt; `drafted` and `accepted` count proposals by their place in a step."""
    stats = Stats(
        target_calls=calls,
        tokens_per_call=(len(tokens) + 1) / calls,
        drafted=sum(drafted),
        accepted=sum(accepted),
        encode_seconds=0.5,
        decode_seconds=decode,
        speculation=Speculation(
            drafted_by_position=list(drafted), accepted_by_position=list(accepted)
        ),
    )
    return Run([Result(None, tokens, [], "stop", stats)], Counter(dict(widths)), draft_passes)


def timed(seconds, rows):
    tokens = [[sum(len(r.tokens) + 1 for r in turn.results) for turn in row] for row in rows]
    return Timed(seconds, tokens, rows)


REGULAR = timed([[4.0, 4.0]] * 2, [[run([5, 6, 7], 4), run([8, 9, 9], 4)]] * 2)


def test_the_figures_of_a_way_are_means_over_its_repeats():
    first = [run([5, 6, 7], 2, (2, 2), (1, 1)), run([8, 9, 9], 2, (2, 2), (1, 1))]
    second = [run([5, 6, 7], 1, (1, 1, 1), (1, 1, 1)), run([8, 9, 9], 1, (1, 1, 1), (1, 1, 0))]
    row = figures.figures(timed([[1.0, 1.0], [3.0, 3.0]], [first, second]), REGULAR)
    assert (row["decided"], row["target_calls"], row["drafted"]) == (8, 3, 7)
    assert (row["accepted"], row["acceptance_rate"]) == (4.5, 9 / 14)
    assert row["tokens_per_call"] == 8 / 3 and row["different"] == 0
    assert row["tokens_per_second"] == 2.0 and row["speed_up"] == Ratio(8 / 3, 4 / 3, 4.0)
    # Two steps of the first repeat kept none and two both; of the second one kept 3, the other 2.
    assert row["steps_by_accepted"] == [1.0, 0.0, 1.5, 0.5]


def test_steps_without_a_proposal_accepted_none():
    row = figures.figures(REGULAR, REGULAR)
    assert row["steps_by_accepted"] == [8.0] and row["acceptance_rate"] is None


def test_a_text_that_differs_in_one_repeat_counts_once():
    good, bad = [[[5, 6, 7]], [[8, 9, 9]]], [[[5, 6, 0]], [[8, 9, 9]]]
    assert figures.differing([good, bad], [good, good]) == 1
    assert figures.differing([bad, bad], [good, good]) == 1
    other = timed([[1.0, 1.0]] * 2, [[run([5, 6, 0], 4), run([8, 9, 9], 4)]] * 2)
    assert figures.figures(other, REGULAR)["different"] == 1
    assert figures.figures(other, REGULAR, greedy=False)["different"] is None


def test_theory_is_of_decoding_and_follows_from_acceptance_and_costs():
    regular = timed([[8.0]] * 3, [[run([5, 6, 7], 4, decode=7.5, widths={1: 4})]] * 3)
    outcomes = [[run([5, 6, 7], 2, (2, 2), (2, 0), s, {3: 2}, 4)] for s in (1.5, 2.5, 3.5)]
    row = figures.beside_theory(timed([[2.0], [3.0], [4.0]], outcomes), regular, COSTS)
    alpha = 2 / 4  # all first proposals kept, no second one
    assert (row["alpha"], row["c"]) == (alpha, 0.25)
    # (1 - alpha^3) / (1 - alpha) tokens for two draft passes and one over three positions
    assert row["predicted"] == pytest.approx((1 - alpha**3) / (1 - alpha) / (2 * 0.25 + 1.5))
    assert row["decode_speed_up"] == Ratio(3.0, 7.5 / 3.5, 5.0)


def test_copies_cost_no_draft_pass():
    copied = timed([[1.0]], [[run([5, 6, 7], 2, (2,), (2,), widths={3: 2})]])
    row = figures.beside_theory(copied, copied, COSTS)
    assert row["c"] == 0.0 and row["predicted"] == pytest.approx(3 / 1.5)


def test_a_lucky_repeat_does_not_make_a_number_the_best():
    def row(*seconds):
        return {"seconds": [[s] for s in seconds], "tokens": [[1]] * len(seconds)}

    steady, lucky = row(1.0, 1.0), row(0.5, 2.0)
    # By its first repeat the lucky one is chosen, and in the second it is slow; then as before.
    assert figures.of_best(steady, [steady, lucky]) == pytest.approx((2.0 + 1.0) / 2)
    assert figures.of_best(row(0.8, 0.8), [steady]) == pytest.approx(1.25)
    assert figures.of_best(row(2.0), [row(1.0)]) == pytest.approx(0.5), "a single repeat"


def test_costs_are_measured_in_the_same_turns():
    class Meter:
        def measure(self):
            return Round({1: 2.0, 2: 3.0}, 0.5)

    way = run([5, 6, 7], 4)
    timed, costs = figures.measure({"regular": lambda turn: way}, 2, 3, Meter())
    assert list(timed) == ["regular"] and timed["regular"].tokens == [[4, 4]] * 3
    assert costs == PairCosts({1: 2.0, 2: 3.0}, {1: 1.0, 2: 1.5}, 0.25)
    assert figures.measure({"regular": lambda turn: way}, 1, 1)[1] is None
