"""Tests exact match, chrF and the texts that are shown."""

import pytest

from mlx_t5.training.texts import Texts, chrf


@pytest.mark.parametrize(
    "written, right",
    [
        (["The cats are sleping."], ["The cats are sleeping."]),
        (["a", "We go home now!", ""], ["abc", "We went  home.", "x"]),
        (["", "xyz"], ["abc", "def"]),
        (["Größe 5 €", "tab\there"], ["Größe 6 €", "tab here"]),
    ],
)
def test_chrf_is_sacrebleus(written, right):
    sacrebleu = pytest.importorskip("sacrebleu")
    assert chrf(written, right) == pytest.approx(sacrebleu.corpus_chrf(written, [right]).score)


def test_wrong_texts_are_shown_first_with_what_they_should_be():
    prompts, right = [f"p{i}" for i in range(5)], [f"r{i}" for i in range(5)]
    texts = Texts(prompts, ["r0", " r1", "r2", "wrong" * 40, "r4"], right)
    assert texts.exact_match == 0.8 and 0 < texts.chrf < 100
    lines = texts.samples().splitlines()
    assert lines[0] == "  p3" and lines[2] == "    not r3"
