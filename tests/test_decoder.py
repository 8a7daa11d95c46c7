"""The decoder's calls on fake models: samples, seeds, order, streams, ends; see test_laws.py."""

import pytest

from decoder import Engine, SpeculativeDecoder
from fake_model import (
    EOS,
    START,
    FakeCache,
    FakeModel,
    always,
    contrary,
    drafter,
    good,
    greedy,
    random_table,
    without,
)
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings

V = 7
TABLE = random_table(V)
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3]]


def target(eos_bias=0.0, seed=0, **config):
    return FakeModel(random_table(V, seed, eos_bias), V, **config)


def test_the_same_prompt_twice_gives_two_samples_and_the_seed_repeats_them():
    model = FakeModel(without(TABLE, EOS), V)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model))
    first = decoder.generate([SOURCES[0]] * 3, max_tokens=20, temp=1.0, seed=5)
    assert len({tuple(r.tokens) for r in first}) == 3
    again = decoder.generate([SOURCES[0]] * 3, max_tokens=20, temp=1.0, seed=5)
    assert [r.tokens for r in again] == [r.tokens for r in first]
    other = decoder.generate([SOURCES[0]] * 3, max_tokens=20, temp=1.0, seed=6)
    assert not {tuple(r.tokens) for r in first} & {tuple(r.tokens) for r in other}


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_samples_of_a_prompt_come_one_after_the_other(batch_size):
    model = FakeModel(without(TABLE, EOS), V)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model))
    options = {"max_tokens": 9, "temp": 1.0, "seed": 5}
    samples = decoder.generate(SOURCES[:2], num_samples=3, batch_size=batch_size, **options)
    # The streams are those of a call with every prompt written three times.
    each = decoder.generate([SOURCES[0]] * 3 + [SOURCES[1]] * 3, **options)
    assert [r.tokens for r in samples] == [r.tokens for r in each]
    assert len({tuple(r.tokens) for r in samples}) == 6
    assert [r.stats.prompt_tokens for r in samples] == [1] * 3 + [6] * 3


def test_samples_of_one_prompt_are_a_list_and_follow_its_own_seed():
    decoder = SpeculativeDecoder(FakeModel(without(TABLE, EOS), V))
    options = {"max_tokens": 9, "temp": 1.0, "num_samples": 2}
    together = decoder.generate(SOURCES[:2], seed=[7, 8], **options)
    alone = decoder.generate(SOURCES[1], seed=8, **options)
    assert [r.tokens for r in alone] == [r.tokens for r in together[2:]]


def test_the_cache_is_as_large_as_the_rows_that_are_left_need(monkeypatch):
    model = FakeModel(without(TABLE, EOS), V)
    engine = Engine(model, None)
    long = Row([3] * 40, Settings(max_tokens=12), row_key(0, 0))
    short = Row([4, 5], Settings(max_tokens=99), row_key(0, 0))
    engine.insert([long])
    for _ in range(10):
        engine.step()
    engine.insert([short])
    trimmed = []
    monkeypatch.setattr(FakeCache, "trim", lambda self, *sizes: trimmed.append(sizes))
    engine.step()
    assert trimmed == []
    engine.step()
    assert (engine.rows, trimmed) == ([short], [(2, 2)])


def test_finished_rows_leave_and_waiting_ones_take_their_place():
    model = target(eos_bias=0.5)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model))
    sources = [[2 + i % 5] * (1 + i % 3) for i in range(11)]
    results = list(decoder.results(sources, max_tokens=10, batch_size=3))
    assert [(r.tokens, r.finish_reason) for r in results] == [greedy(model, s, 10) for s in sources]
    assert max(len(offsets) for offsets, _ in model.calls) == 3


def test_results_come_as_soon_as_they_and_all_before_them_are_done():
    model = FakeModel(without(TABLE, EOS), V)
    decoder = SpeculativeDecoder(model)
    results = decoder.results([[5], [3], [6], [4]], max_tokens=6, batch_size=2)
    next(results)
    assert len(model.calls) == 6
    next(results)
    assert len(model.calls) == 6
    next(results)
    assert len(model.calls) == 12


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


def test_a_stream_given_up_leaves_the_decoder_as_it_was():
    model = target(eos_bias=-3.0)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model))
    stream = decoder.stream(SOURCES[0], max_tokens=30)
    next(stream)
    stream.close()
    assert decoder.generate(SOURCES[1], max_tokens=9).tokens == greedy(model, SOURCES[1], 9)[0]


def test_two_streams_of_one_decoder_do_not_disturb_each_other():
    model = target(eos_bias=-3.0)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model))
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


def test_start_and_end_tokens_come_from_the_config():
    def table(source, seen):
        assert seen[0] == 3
        return TABLE(source, seen)

    model = FakeModel(table, V, decoder_start_token_id=3, eos_token_id=5)
    result = SpeculativeDecoder(model).generate([[2]], max_tokens=30)[0]
    assert (result.tokens, result.finish_reason) == greedy(model, [2], 30)
    assert 5 not in result.tokens


@pytest.mark.parametrize("num_draft", [1, 2, 4])
def test_each_of_several_end_tokens_ends_the_text(num_draft):
    target = FakeModel(TABLE, V, eos_token_id=5, more_eos_token_ids=(3, 2))
    draft = DraftModel(FakeModel(good(TABLE), V, eos_token_id=3), target)
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


def test_statistics_of_steps():
    model = FakeModel(without(TABLE, EOS), V)
    decoder = SpeculativeDecoder(model, drafter(contrary(model.table), model), None, 3)
    steps = decoder.generate(SOURCES[0], max_tokens=6).stats.speculation
    assert steps.steps_by_length == [1, 1, 1, 3]
    assert steps.steps_by_accepted == [6]
    assert steps.drafted_by_position == [5, 4, 3]
    assert steps.accepted_by_position == [0, 0, 0]
