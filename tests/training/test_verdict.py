"""The verdict, on numbers that can be checked by hand."""

from dataclasses import replace

import pytest

from mlx_t5.engine.rows import Result, Stats
from mlx_t5.timing import Ratio
from mlx_t5.training import verdict
from mlx_t5.training.verdict import (
    LOOKUP,
    Proposer,
    advice,
    measure_proposers,
    report,
    typical,
)


def proposer(name, speed, acceptance=0.8):
    return Proposer(name, acceptance, 4.2, Ratio(speed, speed, speed))


@pytest.mark.parametrize(
    ("proposers", "begins"),
    [
        ([("new", 2.0), ("old", 1.5)], "recommended: --draft-model new, 2.00 (2.00"),
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


def test_every_proposer_is_measured_and_fits_the_table(monkeypatch):
    monkeypatch.setattr(verdict, "BUDGET_SECONDS", 0)
    asked, turns_of = [], {}

    def decoding(name):
        asked.append(name)
        turns_of[name] = []

        def decode(turn):
            turns_of[name].append(turn)
            return [result(2, 2, 2, 4) if name else result(0, 0, 4, 4)]

        return decode

    proposers, turns = measure_proposers(decoding, ["new", "lookup"], 20)
    assert turns == verdict.LEAST_TURNS and [p.name for p in proposers] == asked[1:]
    assert asked == ["", "new", "lookup"]
    each = (1 + verdict.REPEATS) * [*range(turns)]  # once to warm up
    assert sorted(turns_of["new"]) == sorted(turns_of["lookup"]) == sorted(each)
    lines = report(proposers, "new", turns).splitlines()
    assert lines[2].startswith("| none |") and lines[3].startswith("| new | 100.0% | 2.00 | ")
    assert lines[6].startswith("4 held-out prompts") and lines[-1].startswith(
        ("recommended", "keep")
    )
