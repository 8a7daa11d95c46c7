"""The engine's laws, on fake models whose cache is the list of tokens fed to them."""

import numpy as np
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
from mlx_t5.requests import Settings
from mlx_t5.sampling.draws import row_key

V = 7
TABLE = random_table(V)
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3]]


def target(eos_bias=0.0, seed=0, **config):
    return FakeModel(random_table(V, seed, eos_bias), V, **config)


def draft_kinds(model):
    """A good draft, the target itself, and three adversaries."""
    return {
        "good": good(model.table),
        "the target itself": model.table,
        "disagrees everywhere": contrary(model.table),
        "always EOS": always(EOS, V),
        "always token 4": always(4, V),
    }


def rows(sources=SOURCES, **settings):
    return [Row(list(s), Settings(**settings), row_key(0, i)) for i, s in enumerate(sources)]


def run(engine, inserted):
    engine.insert(inserted)
    while engine.rows:
        engine.step()
        yield


def check_caches(engine):
    """Law 1, for the rows still in flight."""
    for i, row in enumerate(engine.rows):
        cached = engine.cache.slots[i][: len(row.committed) - 1]
        assert cached == row.committed[:-1]
        if engine.drafter and engine.drafter.fed[i]:
            true = min(engine.drafter.fed[i], len(row.committed) - 1)
            assert engine.drafter.cache.slots[i][:true] == row.committed[:true]


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("num_draft", [1, 3, 6])
@pytest.mark.parametrize("kind", draft_kinds(target()))
def test_caches_hold_what_was_committed(kind, num_draft, temp):
    model = target(eos_bias=-1.0)
    engine = Engine(model, drafter(draft_kinds(model)[kind], model))
    for _ in run(engine, rows(max_tokens=17, num_draft=num_draft, temp=temp)):
        check_caches(engine)


@pytest.mark.parametrize("kind", draft_kinds(target()))
def test_no_token_is_fed_to_the_target_twice(kind):
    model = target(eos_bias=-1.0)
    engine = Engine(model, drafter(draft_kinds(model)[kind], model))
    (row,) = inserted = rows(SOURCES[:1], max_tokens=20, num_draft=4)
    expected = 0
    for _ in run(engine, inserted):
        (offset,), (block,) = model.calls[-1]
        assert offset == expected
        # A block starts with the one committed token that the cache lacks.
        assert block[0] == row.committed[offset]
        expected = row.decided


@pytest.mark.parametrize("eos_bias", [-9.0, 0.0, 1.5])
@pytest.mark.parametrize("num_draft", range(1, 9))
@pytest.mark.parametrize("kind", draft_kinds(target()))
def test_greedy_output_is_that_of_the_target_alone(kind, num_draft, eos_bias):
    model = target(eos_bias)
    decoder = SpeculativeDecoder(model, drafter(draft_kinds(model)[kind], model), None, num_draft)
    for max_tokens in (1, 2, 3, 7, 20):
        results = decoder.generate(SOURCES, max_tokens=max_tokens)
        for source, result in zip(SOURCES, results, strict=True):
            assert (result.tokens, result.finish_reason) == greedy(model, source, max_tokens)


@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_draft", [1, 2, 4, 8])
def test_an_end_token_anywhere_ends_the_row_there(place, num_draft):
    free = FakeModel(without(TABLE, EOS), V)
    expected, _ = greedy(free, SOURCES[1], 9)

    def ending_here(source, seen):
        logits = free.table(source, seen).copy()
        logits[EOS] = 99 if len(seen) == place + 1 else -99
        return logits

    model = FakeModel(ending_here, V)
    # The draft knows the place, so EOS lies inside the accepted tokens, and it goes on after it.
    result = SpeculativeDecoder(model, drafter(ending_here, model), None, num_draft).generate(
        SOURCES[1], max_tokens=30
    )
    assert result.tokens == expected[:place]
    assert result.finish_reason == "stop"
    # Every proposal is right: only the last token of a full block is the target's own.
    own = (place + 1) // (num_draft + 1)
    stats = result.stats
    assert stats.target_calls == -(-(place + 1) // (num_draft + 1))
    assert stats.drafted == stats.accepted == place + 1 - own
    assert stats.generated_tokens == place


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("num_draft", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_a_row_does_not_depend_on_the_rows_beside_it(batch_size, num_draft, temp):
    model = target(eos_bias=-0.5)
    decoder = SpeculativeDecoder(model, drafter(good(model.table), model), None, num_draft)
    sources = [*SOURCES, SOURCES[0], [4, 4, 4]]
    seeds = [11, 12, 13, 14, 15, 16]
    options = {"max_tokens": 12, "temp": temp, "top_p": 0.95}
    together = decoder.generate(sources, seed=seeds, batch_size=batch_size, **options)
    for source, seed, result in zip(sources, seeds, together, strict=True):
        alone = decoder.generate(source, seed=seed, **options)
        assert (alone.tokens, alone.accepted) == (result.tokens, result.accepted)
        assert alone.stats.drafted == result.stats.drafted


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


def test_equal_sources_are_encoded_once(monkeypatch, unpadded):
    model, encoded = target(), []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda ids, mask: encoded.append(ids) or encode(ids, mask))
    SpeculativeDecoder(model).generate([SOURCES[1]], temp=1.0, num_samples=4, max_tokens=3)
    assert [ids.tolist() for ids in encoded] == [[SOURCES[1]]]


def test_rows_may_join_while_others_run_with_settings_of_their_own():
    model = target(eos_bias=-1.0)
    engine = Engine(model, drafter(good(model.table), model))
    every = [
        Row(SOURCES[0], Settings(max_tokens=15, num_draft=2), row_key(0, 0)),
        Row(SOURCES[1], Settings(max_tokens=9, num_draft=5, temp=1.0), row_key(1, 0)),
        Row(SOURCES[2], Settings(max_tokens=12, num_draft=0), row_key(2, 0)),
        Row(SOURCES[3], Settings(max_tokens=20, temp=0.7, top_k=3, delta=0.2), row_key(3, 0)),
    ]
    for row in every:
        engine.insert([row])
        engine.step()
        check_caches(engine)
    while engine.rows:
        engine.step()
        check_caches(engine)
    for row in every:
        alone = Row(row.ids, row.settings, row.key)
        for _ in run(Engine(model, drafter(good(model.table), model)), [alone]):
            pass
        assert alone.committed == row.committed
    assert every[2].stats.drafted == 0


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


@pytest.mark.parametrize("delta", [0.3, 1.0])
def test_delta_one_keeps_every_proposal(delta):
    model = FakeModel(without(TABLE, EOS), V)
    draft = drafter(good(model.table, noise=9), model)
    decoder = SpeculativeDecoder(model, draft, None, num_draft=3, delta=delta)
    for temp in (0.0, 1.0):
        stats = decoder.generate(SOURCES[1], max_tokens=20, temp=temp).stats
        assert (stats.acceptance_rate == 1.0) == (delta == 1.0)


def test_a_draft_that_computes_nan_costs_time_and_nothing_else():
    def broken(source, seen):
        return np.full(V, np.nan, np.float32)

    model = target(eos_bias=-1.0)
    decoder = SpeculativeDecoder(model, drafter(broken, model))
    assert decoder.generate(SOURCES[1], max_tokens=9).tokens == greedy(model, SOURCES[1], 9)[0]
    sampled = decoder.generate([SOURCES[1]] * 30, max_tokens=9, temp=1.0)
    assert len({tuple(result.tokens) for result in sampled}) > 10


def test_the_start_token_counts_as_output_only_where_the_model_writes_it():
    model = FakeModel(always(START, V), V)
    assert SpeculativeDecoder(model).generate([2], max_tokens=3).tokens == [START] * 3
