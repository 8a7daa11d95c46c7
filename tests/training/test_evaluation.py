"""Tests chrF, the texts that are shown, and the verdict on numbers that can be checked by hand."""

import pytest

from mlx_t5.timing import Ratio
from mlx_t5.training.evaluation import Proposer, Texts, advice, chrf, needs_prompts


@pytest.mark.parametrize(
    "written, right",
    [
        (["The cats are sleping."], ["The cats are sleeping."]),
        (["a", "We go home now!", ""], ["abc", "We went  home.", "x"]),
        (["", "xyz"], ["abc", "def"]),
    ],
)
def test_chrf_is_sacrebleus(written, right):
    sacrebleu = pytest.importorskip("sacrebleu")
    assert chrf(written, right) == pytest.approx(sacrebleu.corpus_chrf(written, [right]).score)


def test_wrong_texts_are_shown_first_with_what_they_should_be():
    prompts, right = [f"p{i}" for i in range(5)], [f"r{i}" for i in range(5)]
    texts = Texts(prompts, ["r0", " r1", "r2", "wrong" * 40, "r4"], right, 0.5)
    assert texts.exact_match == 0.8 and 0 < texts.chrf < 100
    copying = Texts(prompts, right, right, 0.6)
    assert texts.value > copying.value and texts.chrf < copying.chrf  # the loss decides
    lines = texts.samples().splitlines()
    assert lines[0] == "  p3" and lines[2] == "    not r3"


def proposer(name, speed, acceptance=0.8, low=None, most=4.2):
    return Proposer(name, acceptance, 4.2, Ratio(speed, low or speed, speed), most)


@pytest.mark.parametrize(
    ("proposers", "begins"),
    [
        ([("new", 2.0), ("old", 1.5)], "recommended: --draft-model new, 2.00 (2.00"),
        ([("new", 2.0), ("old", 1.97)], "keep what you have: "),  # the new one is no faster
        ([("new", 1.01)], "keep --draft-model none"),
        ([("new", 1.5), ("lookup", 2.0)], "keep to copying, without"),
        # A proposer without accepted tokens is faster by chance.
        ([("new", 2.0, None), ("old", 1.5)], "keep what you have: "),
        ([("new", 1.5), ("old", 1.9, 0.4, 1.9, 1.8)], "recommended: --draft-model new"),
        ([("new", 1.5), ("lookup", 1.9, 0.8, 1.004)], "recommended: --draft-model new"),
        ([("new", 1.5, 0.8, 1.0)], "keep --draft-model none"),
    ],
)
def test_the_verdict_recommends_the_fastest_draft(proposers, begins):
    assert advice([proposer(*one) for one in proposers], "new").startswith(begins)


def test_more_prompts_help_where_only_the_training_loss_improves():
    fell = [(float("nan"), 0.1), (2.0, 0.5), (1.0, 0.7), (0.8, 0.7)]
    assert needs_prompts(fell)
    assert not needs_prompts([*fell[:3], (0.8, 0.74)]) and not needs_prompts(
        [*fell[:3], (0.95, 0.7)]
    )
    assert not needs_prompts(fell[:3])
