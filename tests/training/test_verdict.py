"""The verdict, on numbers that can be checked by hand."""

from dataclasses import replace

import pytest

from mlx_t5.drafting.costs import Costs
from mlx_t5.engine.rows import Result, Stats
from mlx_t5.timing import Ratio
from mlx_t5.training import verdict
from mlx_t5.training.verdict import (
    LOOKUP,
    Proposer,
    advice,
    best_num_draft,
    measure_proposers,
    report,
    typical,
)

FLAT = {1: 1.0, 64: 1.0}
COSTS = Costs(target=FLAT, draft={1: 0.1})


def proposer(name, speed, acceptance=0.8):
    return Proposer(name, 5, acceptance, 4.2, 0.1, 2.0, Ratio(speed, speed, speed))


def test_the_number_of_proposals_that_should_gain_most():
    assert best_num_draft(0.0, COSTS) == (1, pytest.approx(1 / 1.1))
    gamma, gain = best_num_draft(0.9, COSTS)
    assert gamma in (8, 9) and gain > 3
    assert best_num_draft(0.9, Costs({1: 1.0, 2: 3.0, 64: 3.0}, {1: 0.1}))[0] == 9
    stairs = Costs({1: 1.0, 5: 1.0, 6: 2.0, 64: 2.0}, {1: 0.1})
    assert best_num_draft(0.7, stairs)[0] == 4  # one position before the step


@pytest.mark.parametrize(
    ("proposers", "begins"),
    [
        ([("new", 2.0), ("old", 1.5)], "recommended: --draft-model new --num-draft 5, 2.00 (2.00"),
        ([("new", 2.0), ("old", 1.97)], "keep what you have: "),  # the new one is no faster
        ([("new", 1.01)], "keep --draft-model none"),
        ([("new", 1.5), (LOOKUP, 2.0)], "keep to copying, without"),
        # What proposes in vain is faster by chance.
        ([("new", 2.0, 0.0)], "keep --draft-model none"),
        ([("new", 2.0, None), ("old", 1.5)], "keep what you have: "),
    ],
)
def test_what_is_recommended(proposers, begins):
    assert advice([proposer(*one) for one in proposers], "new").startswith(begins)


def result(drafted, accepted, calls, decided):
    stats = Stats(target_calls=calls, tokens_per_call=decided / calls)
    stats.drafted, stats.accepted = drafted, accepted
    stats.speculation.drafted_by_position = [calls] * (drafted // calls)
    stats.speculation.accepted_by_position = [accepted]
    return Result(None, [], [], "stop", stats)


def test_a_few_texts_without_end_do_not_choose_the_draft():
    ended, endless = result(2, 1, 2, 3), replace(result(9, 9, 9, 99), finish_reason="length")
    assert typical([ended, endless, ended]) == [ended, ended]
    assert typical([ended, endless, endless]) == [ended, endless, endless]


def test_every_proposer_is_measured_with_its_own_number_and_fits_the_table(monkeypatch):
    monkeypatch.setattr(verdict, "BUDGET_SECONDS", 0)
    asked = []

    def decoding(name, num_draft):
        asked.append((name, num_draft))
        return lambda turn: [result(2, 2, 2, 4) if name else result(0, 0, 4, 4)]

    costs = {"new": COSTS, "lookup": Costs(FLAT, {})}
    proposers, turns = measure_proposers(decoding, costs, 5, 20)
    assert turns == verdict.LEAST_TURNS and [p.name for p in proposers] == ["new", "lookup"]
    assert asked == [("", 0), ("new", 5), ("lookup", 5), ("new", 9), ("lookup", 9)]
    lines = report(proposers, COSTS, "new", turns).splitlines()
    assert lines[2].startswith("| none |") and lines[3].startswith(
        "| new | 9 | 100.0% | 2.00 | 0.1"
    )
    assert "v(5) = 1.00" in lines[6] and lines[-1].startswith(("recommended", "keep"))
