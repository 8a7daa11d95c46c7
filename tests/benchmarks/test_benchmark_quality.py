"""Quality figures and packages that are only sometimes needed."""

import pytest

from benchmarks.extras import needed
from benchmarks.quality import chrf, exact_match, quality
from mlx_t5.errors import UserError


def test_exact_match_is_a_share():
    assert exact_match(["a", "b", "c", "d"], ["a", "b", "c", "x"]) == 75.0


def test_chrf_tells_a_wrong_letter_from_a_wrong_sentence():
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


def test_a_missing_package_is_one_line_that_says_what_to_install():
    with pytest.raises(UserError) as error:
        needed("no_such_package")
    assert str(error.value).startswith("no_such_package cannot be imported (No module named")
    assert str(error.value).endswith("pip install -r requirements/benchmark.txt")
    assert needed("json").dumps([1]) == "[1]"
