"""Tests the decoder on fake models: samples, seeds, order, streams, ends; see test_laws.py."""

import pytest

from fake_model import (
    EOS,
    START,
    FakeModel,
    always,
    contrary,
    drafter,
    good,
    greedy,
    random_table,
    without,
)
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.draft_model import DraftModel

V = 7
TABLE = random_table(V)
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3]]


def target(eos_bias=0.0, seed=0, **config):
    return FakeModel(random_table(V, seed, eos_bias), V, **config)


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_samples_of_a_prompt_come_one_after_the_other(batch_size):
    model = FakeModel(without(TABLE, EOS), V)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model), None, 5)
    options = {"max_tokens": 9, "temp": 1.0, "seed": 5}
    samples = decoder.generate(SOURCES[:2], num_samples=3, batch_size=batch_size, **options)
    # The random streams equal those of a call with every prompt written three times.
    repeats = decoder.generate([SOURCES[0]] * 3 + [SOURCES[1]] * 3, **options)
    assert [r.tokens for r in samples] == [r.tokens for r in repeats]
    assert len({tuple(r.tokens) for r in samples}) == 6
    other_samples = decoder.generate(SOURCES[:2], num_samples=3, **options | {"seed": 6})
    assert not {tuple(r.tokens) for r in samples} & {tuple(r.tokens) for r in other_samples}
    assert [r.stats.prompt_tokens for r in samples] == [1] * 3 + [6] * 3


def test_samples_of_one_prompt_are_a_list_and_follow_its_own_seed():
    decoder = SpeculativeDecoder(FakeModel(without(TABLE, EOS), V))
    options = {"max_tokens": 9, "temp": 1.0, "num_samples": 2}
    together = decoder.generate(SOURCES[:2], seed=[7, 8], **options)
    alone = decoder.generate(SOURCES[1], seed=8, **options)
    assert [r.tokens for r in alone] == [r.tokens for r in together[2:]]


def test_stream_adds_up_to_generate():
    model = target(eos_bias=-0.5)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model), None, 3)
    whole = decoder.generate(SOURCES[1], max_tokens=15, temp=0.8, seed=3)
    chunks = list(decoder.stream(SOURCES[1], max_tokens=15, temp=0.8, seed=3))
    assert sum((c.tokens for c in chunks), []) == whole.tokens
    assert sum((c.accepted for c in chunks), []) == whole.accepted
    assert [c.result is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].result.tokens == whole.tokens
    assert len(chunks) == whole.stats.target_calls


def test_two_streams_of_one_decoder_do_not_disturb_each_other():
    model = target(eos_bias=-3.0)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model), None, 5)
    one, two = decoder.stream(SOURCES[0], 12), decoder.stream(SOURCES[1], 12)
    collected = ([], [])
    for chunks in zip(one, two, strict=False):
        for tokens, chunk in zip(collected, chunks, strict=True):
            tokens += chunk.tokens
    for tokens, rest in zip(collected, (one, two), strict=True):
        tokens += sum((chunk.tokens for chunk in rest), [])
    shorter = min(map(len, collected))
    for tokens, source in zip(collected, SOURCES, strict=False):
        assert tokens[:shorter] == greedy(model, source, 12)[0][:shorter]


@pytest.mark.parametrize("num_draft", [1, 2, 4])
def test_each_of_several_end_tokens_ends_the_text(num_draft):
    special = {"eos_token_id": 5, "decoder_start_token_id": 4}
    target = FakeModel(TABLE, V, more_eos_token_ids=(3, 2), **special)
    draft = DraftModel(FakeModel(good(TABLE), V, **special | {"eos_token_id": 3}), target)
    decoder = SpeculativeDecoder(target, draft, None, num_draft)
    results = decoder.generate(SOURCES, max_tokens=30)
    assert [(r.tokens, r.finish_reason) for r in results] == [
        greedy(target, source, 30) for source in SOURCES
    ]
    late = decoder.generate(SOURCES, max_tokens=30, min_tokens=9)
    assert all(len(r.tokens) >= 9 and not {2, 3, 5} & set(r.tokens) for r in late)


def test_the_start_token_counts_as_output_only_where_the_model_writes_it():
    model = FakeModel(always(START, V), V)
    assert SpeculativeDecoder(model).generate([2], max_tokens=3).tokens == [START] * 3


@pytest.mark.parametrize(
    ("draft", "most", "counts"),
    [
        # Steps decide 3 + 1, 3 + 1 and, as only two tokens are left, 1 + 1 tokens.
        (without(TABLE, EOS), 10, (3, 7, 7)),
        (always(EOS, V), 5, (5, 3 + 3 + 2 + 1 + 0, 0)),
        (None, 5, (5, 0, 0)),
    ],
)
def test_statistics_of_perfect_useless_and_missing_drafts_are_right(draft, most, counts):
    model = FakeModel(without(TABLE, EOS), V)
    decoder = SpeculativeDecoder(model, draft and drafter(draft, model), None, 3)
    stats = decoder.generate(SOURCES[0], max_tokens=most).stats
    assert (stats.target_calls, stats.drafted, stats.accepted) == counts
    assert (stats.prompt_tokens, stats.generated_tokens) == (1, most)
    assert stats.acceptance_rate == stats.accepted / max(stats.drafted, 1)
    assert stats.tokens_per_call == pytest.approx(most / stats.target_calls)


def test_times_come_from_the_clock():
    ticks = iter(range(100))
    decoder = SpeculativeDecoder(FakeModel(without(TABLE, EOS), V), clock=lambda: next(ticks))
    stats = decoder.generate(SOURCES[0], max_tokens=4).stats
    # One tick for the insertion and one for each step.
    assert (stats.encode_seconds, stats.decode_seconds) == (1, 4)
    assert stats.tokens_per_second == 1.0


def test_each_token_has_its_origin():
    model = FakeModel(without(TABLE, EOS), V)
    drafted = SpeculativeDecoder(model, drafter(model.table, model), None, num_draft=2)
    result = drafted.generate(SOURCES[0], max_tokens=7)
    assert result.accepted == [True, True, False] * 2 + [False]
    assert SpeculativeDecoder(model).generate(SOURCES[0], max_tokens=7).accepted == [False] * 7


def test_steps_are_counted_by_length_and_position():
    model = FakeModel(without(TABLE, EOS), V)
    decoder = SpeculativeDecoder(model, drafter(contrary(model.table), model), None, 3)
    steps = decoder.generate(SOURCES[0], max_tokens=6).stats.speculation
    assert steps.steps_by_length == [1, 1, 1, 3]
    assert steps.steps_by_accepted == [6]
    assert steps.drafted_by_position == [5, 4, 3]
    assert steps.accepted_by_position == [0, 0, 0]
