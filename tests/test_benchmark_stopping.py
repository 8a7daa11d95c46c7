"""`stopping`: the replay by the letter, what is noted on real models, and a small run."""

import pytest

from benchmarks import command_line, stopping
from benchmarks.stopping import AHEAD, FREE, WAIT, Place, compare, replay
from benchmarks.subject import Subject
from draft_length import LONGEST
from pair import BUNDLED

FLAT = [1.0] * (LONGEST + 1)


def test_a_draft_ends_with_the_token_that_makes_it_unsure():
    place = Place(2, [0.9, 0.9, 0.5, 0.9])
    assert [place.length(t) for t in (0.95, 0.85, 0.5, 0.1)] == [1, 2, 3, 4]


def test_a_replay_adds_up_what_steps_cost_and_where_they_lead():
    # Three tokens, two of which are kept from the start; then the target ends the text.
    text = [Place(2, []), Place(1, []), Place(0, [])]
    verify = [1.0, 1.5, 2.0] + [9.0] * (LONGEST - 2)
    assert replay([text], lambda _: 0, verify, 0.5, 0) == (1.0, 1.0)
    # One step of two drafts and three positions.
    assert replay([text], lambda _: 2, verify, 0.5, 0) == (3 / (2.0 + 2 * 0.5), 3.0)
    # Two steps of one draft, one pass wasted in each.
    assert replay([text], lambda _: 1, verify, 0.5, 1) == (3 / (2 * (1.5 + 2 * 0.5)), 1.5)
    # No more than LONGEST passes.
    assert replay([text], lambda _: LONGEST, FLAT, 0.1, 1)[0] == pytest.approx(
        3 / (1 + LONGEST * 0.1)
    )


def test_stopping_wins_where_it_is_free_and_loses_where_looking_costs_too_much():
    # Good for eight tokens or for none, and the draft knows which.
    text = [Place(8, [1.0] * 8 + [0.1] * 7)] + [Place(0, [0.1] * LONGEST)] * 12
    passes = {FREE: 0.1, AHEAD: 0.1, WAIT: 1.0}
    by_rule = {row["rule"]: row["speed_up"] for row in compare([text], FLAT, passes)}
    fixed, wait, ahead, free = by_rule.values()
    assert wait < fixed < ahead < free


def test_what_is_noted_is_what_the_engine_accepts():
    subject = Subject.load(str(BUNDLED / "target"), str(BUNDLED / "draft"), "float32")
    prompt = "fix grammar: She have two cat and she like to play with them."
    text = stopping.noted(subject, prompt, 60)
    for gamma in (1, 4, 7):
        stats = subject.speculative("draft", gamma).generate(prompt, max_tokens=60).stats
        per_call = replay([text], lambda _, n=gamma: n, FLAT, 0.0, 0)[1]
        assert per_call == pytest.approx(stats.tokens_per_call)
    assert all(0 < p <= 1.000001 for place in text for p in place.sure)


def test_a_small_run(capsys, tmp_path):
    argv = ["stopping", "--task", "fix", "--count", "2", "--repeats", "1", "--dtype", "float32"]
    assert command_line.main([*argv, "--json", str(tmp_path / "s.json")]) == 0
    out = capsys.readouterr().out
    assert "| a fixed number |" in out
    assert f"stop below a threshold, {WAIT}" in out
    assert (tmp_path / "s.json").stat().st_size > 500
