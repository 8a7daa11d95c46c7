"""Statistics and who wrote what, on fake models."""

import pytest

from decoder import SpeculativeDecoder
from fake_model import EOS, FakeModel, always, drafter, random_table, without

V = 7
TABLE = random_table(V)
SOURCE = [5]


def test_statistics_of_a_perfect_draft():
    model = FakeModel(without(TABLE, EOS), V)
    stats = (
        SpeculativeDecoder(model, drafter(model.table, model), None, num_draft=3)
        .generate(SOURCE, max_tokens=10)
        .stats
    )
    # 3 + 1, 3 + 1, and the last step may use one proposal: 1 + 1.
    assert (stats.target_calls, stats.drafted, stats.accepted) == (3, 7, 7)
    assert (stats.prompt_tokens, stats.generated_tokens) == (1, 10)
    assert stats.acceptance_rate == 1.0
    assert stats.tokens_per_call == pytest.approx(10 / 3)


def test_statistics_of_a_useless_draft_and_of_none():
    model = FakeModel(without(TABLE, EOS), V)
    useless = SpeculativeDecoder(model, drafter(always(EOS, V), model), None, num_draft=3)
    stats = useless.generate(SOURCE, max_tokens=5).stats
    assert (stats.target_calls, stats.drafted, stats.accepted) == (5, 3 + 3 + 2 + 1 + 0, 0)
    assert stats.acceptance_rate == 0.0
    stats = SpeculativeDecoder(model).generate(SOURCE, max_tokens=5).stats
    assert (stats.target_calls, stats.drafted, stats.tokens_per_call) == (5, 0, 1.0)


def test_times_come_from_the_clock():
    ticks = iter(range(100))
    model = FakeModel(without(TABLE, EOS), V)
    stats = (
        SpeculativeDecoder(model, clock=lambda: next(ticks)).generate(SOURCE, max_tokens=4).stats
    )
    # One tick for the insertion and one a step.
    assert (stats.encode_seconds, stats.decode_seconds) == (1, 4)
    assert stats.tokens_per_second == 1.0


def test_each_token_says_who_wrote_it():
    model = FakeModel(without(TABLE, EOS), V)
    result = SpeculativeDecoder(model, drafter(model.table, model), None, num_draft=2).generate(
        SOURCE, max_tokens=7
    )
    assert result.accepted == [True, True, False] * 2 + [False]
    regular = SpeculativeDecoder(model).generate(SOURCE, max_tokens=7)
    assert regular.accepted == [False] * 7
