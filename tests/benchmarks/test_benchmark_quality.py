"""Figures of quality, and which setting is recommended on grids small enough to see by eye."""

from benchmarks.quality import chrf, exact_match, explain, quality, recommend
from mlx_t5.timing import Ratio


def test_chrf_tells_a_wrong_letter_from_a_wrong_sentence_and_exact_match_does_not():
    assert exact_match(["a", "b", "c", "d"], ["a", "b", "c", "x"]) == 75.0
    right = ["The cats are sleeping."]
    letter, sentence = chrf(["The cats are sleping."], right), chrf(["We go home now!"], right)
    assert chrf(right, right) == 100.0 > letter > 80.0 > 30.0 > sentence


def test_quality_is_judged_by_references_and_by_delta_0():
    figures = quality(["a b c d", "x"], ["a b c d", "y"], ["q", "x"])
    assert (figures["exact_match"], figures["exact_match_lossless"]) == (50.0, 50.0)
    assert figures["chrf"] > figures["chrf_lossless"]
    unknown = quality(["a"], None, ["a"])
    assert unknown["exact_match"] is unknown["chrf"] is None
    assert unknown["exact_match_lossless"] == 100.0


def row(delta, gamma, speed, exact=90.0, chrf=99.0, references=True, tokens=None):
    judged = {"exact_match": exact, "chrf": chrf} if references else {}
    unknown = {"exact_match": None, "chrf": None}
    lossless = {"exact_match_lossless": exact, "chrf_lossless": chrf}
    speed_up = Ratio(speed, speed - 0.1, speed + 0.1)
    setting = {"delta": delta, "num_draft": gamma, "speed_up": speed_up}
    setting["tokens_per_call"] = tokens or 2 + delta  # relaxing keeps more proposals
    return setting | unknown | lossless | judged


def setting(row):
    return row and (row["delta"], row["num_draft"])


def test_the_fastest_that_keeps_its_quality():
    rows = [row(0.0, 3, 1.5), row(0.5, 3, 2.0, exact=89.5), row(1.0, 3, 3.0, exact=50.0)]
    assert setting(recommend(rows, tolerance=1.0)) == (0.5, 3)
    assert setting(recommend(rows, tolerance=0.1)) == (0.0, 3)
    assert setting(recommend(rows, tolerance=50.0)) == (1.0, 3)
    # Both measures have to hold, and better than lossless is no loss.
    rows = [row(0.0, 3, 1.5), row(0.5, 3, 2.0, chrf=97.0)]
    assert setting(recommend(rows, tolerance=1.0)) == (0.0, 3)
    assert setting(recommend([row(0.0, 3, 1.5), row(0.5, 3, 2.0, exact=95.0)], 1.0)) == (0.5, 3)


def test_of_settings_about_as_fast_the_one_with_the_fewest_proposals():
    rows = [row(0.0, 5, 2.0), row(0.0, 3, 1.97), row(0.0, 2, 1.95)]
    assert setting(recommend(rows, 1.0)) == (0.0, 3)


def test_a_greater_delta_has_to_gain_in_every_repeat():
    # The slowest repeat is 0.1 below the figure, and what counts begins at 2 %.
    for speed, expected in ((2.03, (0.0, 3)), (2.13, (0.0, 3)), (2.15, (0.5, 2))):
        rows = [row(0.0, 2, 1.5), row(0.0, 3, 2.0), row(0.5, 2, speed), row(0.5, 3, 1.9)]
        assert setting(recommend(rows, 1.0)) == expected
    # Each step has to be worth it by itself.
    rows = [row(0.0, 3, 2.0), row(0.5, 3, 2.5), row(0.9, 3, 2.55), row(1.0, 3, 3.0)]
    assert setting(recommend(rows[:3], 1.0)) == (0.5, 3)
    assert setting(recommend(rows, 1.0)) == (1.0, 3)


def test_a_greater_delta_has_to_keep_more_proposals():
    # Compared with as many of them: three proposals yield more tokens than two in any case.
    rows = [row(0.0, 2, 1.5, tokens=2.0), row(0.0, 3, 1.4, tokens=2.5)]
    for tokens, expected in ((2.5, (0.0, 2)), (2.54, (0.0, 2)), (2.56, (0.5, 3))):
        assert setting(recommend([*rows, row(0.5, 3, 3.0, tokens=tokens)], 1.0)) == expected


def test_regular_decoding_where_nothing_is_faster():
    rows = [row(0.0, 3, 0.9), row(0.5, 3, 1.2, exact=0.0)]
    assert recommend(rows, 1.0) is None
    assert "recommended: --regular-decode" in explain(rows, 1.0, 60)


def test_without_references_delta_0_is_the_measure():
    rows = [
        row(0.0, 3, 1.5, exact=100.0, chrf=100.0, references=False),
        row(0.5, 3, 2.0, exact=98.0, chrf=99.9, references=False),
    ]
    assert setting(recommend(rows, 1.0)) == (0.0, 3)
    assert "against delta 0's texts" in explain(rows, 1.0, 60)
