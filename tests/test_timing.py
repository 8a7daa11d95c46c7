"""Tests interleaved measuring and every figure made of times, with exact values."""

from mlx_t5.timing import Ratio, Timed, differing, interleave, median_total, speed_up, spread


def test_medians_and_spreads_are_those_of_the_turns():
    assert median_total([[1.0, 10.0], [5.0, 20.0], [2.0, 90.0]]) == 2.0 + 20.0
    assert spread([3.0, 1.0, 8.0]) == Ratio(3.0, 1.0, 8.0)
    timed = Timed([[1.0, 2.0, 3.0]], [[4, 5, 6]], [["a", "b", "c"]])
    assert timed.only([0, 2]) == Timed([[1.0, 3.0]], [[4, 6]], [["a", "c"]])


def test_a_speed_up_is_the_median_of_the_repeats_and_so_lies_in_their_range():
    base = Timed([[4.0, 4.0], [2.0, 2.0], [3.0, 9.0]], [[1, 1]] * 3)  # totals 8, 4 and 12
    other = Timed([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]], [[1, 1]] * 3)  # totals 2, 4 and 2
    assert str(speed_up(base, other)) == "4.00 (1.00 to 6.00)"
    # Texts of different lengths are compared by time per token.
    assert speed_up(Timed([[10.0]], [[10]]), Timed([[20.0]], [[40]])).value == 2.0
    assert Timed([[20.0], [30.0]], [[40], [20]]).repeats_a_token() == [0.5, 1.5]


def test_a_text_that_differs_in_one_repeat_counts_once():
    first = [[[[5, 6], [8]]], [[[5, 6], [8]]]]  # two repeats of one turn with two prompts
    second = [[[[5, 6], [8]]], [[[5, 6], [9]]]]
    assert (differing(first, first), differing(first, second), differing(second, first)) == (
        0,
        1,
        1,
    )


def test_variants_are_interleaved_and_the_warm_up_is_not_counted():
    now, seen = [0.0], []

    def variant(name, seconds):
        def run(turn):
            seen.append((turn, name))
            now[0] += seconds + turn
            return name * 3

        return run

    variants = {"a": variant("a", 1.0), "b": variant("b", 2.0)}
    timed = interleave(variants, 2, 3, len, clock=lambda: now[0])
    assert timed["a"] == Timed([[1.0, 2.0]] * 3, [[3, 3]] * 3, [["aaa"] * 2] * 3)
    assert timed["b"].seconds == [[2.0, 3.0]] * 3
    # Both variants finish a turn before either starts the next.
    assert [turn for turn, _ in seen] == [0, 0, 1, 1] * (1 + 3)
    seen.clear()
    interleave(variants, 2, 3, len, clock=lambda: now[0], warm_up=False)
    assert len(seen) == 2 * 2 * 3
