"""`num_draft="auto"` in the engine: the same laws, whatever the pacer chooses."""

import pytest

from decoder import Engine, SpeculativeDecoder
from fake_model import (
    EOS,
    FakeModel,
    always,
    contrary,
    drafter,
    good,
    greedy,
    random_table,
    without,
)
from mlx_t5.drafting.adaptive import Adaptive
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.requests import Settings
from mlx_t5.sampling.draws import row_key
from simulated_decoding import COSTS, costs

V = 7
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3]]
CHEAP = costs(0.01, lambda n: 1 + 0.005 * (n - 1))
LINEAR = costs(0.1, float)
PRICED = {"cheap": CHEAP, **COSTS}


def target(eos_bias=-1.0):
    return FakeModel(random_table(V, 0, eos_bias), V)


def drafters(model):
    return {
        "good": drafter(good(model.table), model),
        "the target itself": drafter(model.table, model),
        "never right": drafter(contrary(model.table), model),
        "always EOS": drafter(always(EOS, V), model),
        "copy": SourceCopy(),
        "copy or draft": CopyOrDraft(SourceCopy(), drafter(good(model.table), model)),
    }


def auto(model, draft, costs=CHEAP, **options):
    return SpeculativeDecoder(model, draft, None, "auto", costs=costs, **options)


@pytest.mark.parametrize("price", PRICED)
@pytest.mark.parametrize("kind", drafters(target()))
def test_greedy_output_is_that_of_the_target_alone(kind, price):
    model = target()
    decoder = auto(model, drafters(model)[kind], PRICED[price])
    for max_tokens in (1, 2, 12, 30):
        results = decoder.generate(SOURCES, max_tokens=max_tokens, batch_size=3)
        for source, result in zip(SOURCES, results, strict=True):
            assert (result.tokens, result.finish_reason) == greedy(model, source, max_tokens)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["good", "never right"])
def test_caches_hold_what_was_committed(kind, temp):
    model = FakeModel(without(random_table(V), EOS), V)
    drafter = drafters(model)[kind]
    adaptive = Adaptive(lambda: COSTS["a CPU"], drafter.kinds)
    engine = Engine(model, drafter, adaptive=adaptive)
    settings = Settings(40, num_draft="auto", temp=temp)
    engine.insert([Row(s, settings, row_key(0, i)) for i, s in enumerate(SOURCES)])
    lengths = set()
    while engine.rows:
        engine.step()
        lengths.add(len(model.calls[-1][1][0]))
        for i, row in enumerate(engine.rows):
            assert engine.cache.slots[i][: row.decided] == row.committed[:-1]
            fed = min(engine.drafter.fed[i], row.decided)
            assert engine.drafter.cache.slots[i][:fed] == row.committed[:fed]
    if temp == 0:
        assert len(lengths) > 1, "the choice never changed"


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["good", "never right", "copy or draft"])
def test_a_sampled_or_lenient_row_is_written_as_if_it_were_alone(kind, temp):
    model = FakeModel(without(random_table(V), EOS), V)
    decoder = auto(model, drafters(model)[kind], COSTS["a CPU"])
    options = {"max_tokens": 40, "temp": temp, "delta": 0.3}
    seeds = [4, 5, 6, 7]
    together = decoder.generate(SOURCES, seed=seeds, batch_size=3, **options)
    for source, seed, result in zip(SOURCES, seeds, together, strict=True):
        assert decoder.generate(source, seed=seed, **options).tokens == result.tokens


def test_what_was_decoded_before_does_not_change_a_sampled_text():
    model = FakeModel(without(random_table(V), EOS), V)
    for lenient in ({"temp": 1.0}, {"temp": 0.0, "delta": 0.5}):
        decoder = auto(model, drafters(model)["good"], COSTS["a CPU"])
        first = decoder.generate(SOURCES[0], max_tokens=30, **lenient)
        decoder.generate(SOURCES * 4, max_tokens=30)
        assert decoder.generate(SOURCES[0], max_tokens=30, **lenient).tokens == first.tokens


def test_good_proposals_are_asked_for_and_bad_ones_are_not():
    model = FakeModel(without(random_table(V), EOS), V)
    perfect = auto(model, drafters(model)["the target itself"]).generate(SOURCES[0], 60).stats
    assert perfect.tokens_per_call > 8
    decoder = auto(model, drafters(model)["never right"], COSTS["a CPU"])
    assert decoder.generate(SOURCES[0], max_tokens=60).stats.drafted < 30
    costly = auto(model, drafters(model)["the target itself"], LINEAR)
    assert costly.generate(SOURCES[0], max_tokens=9).stats.drafted == 0


def test_statistics_of_steps():
    model = FakeModel(without(random_table(V), EOS), V)
    decoder = SpeculativeDecoder(model, drafters(model)["never right"], None, 3)
    steps = decoder.generate(SOURCES[0], max_tokens=6).stats.speculation
    assert steps.steps_by_length == [1, 1, 1, 3]
    assert steps.steps_by_accepted == [6]
    assert steps.drafted_by_position == [5, 4, 3]
    assert steps.accepted_by_position == [0, 0, 0]


def test_a_row_with_a_number_of_its_own_keeps_it_beside_rows_without():
    model = FakeModel(without(random_table(V), EOS), V)
    draft = drafters(model)["the target itself"]
    engine = Engine(model, draft, adaptive=Adaptive(lambda: CHEAP, draft.kinds))
    fixed, free = (Row(SOURCES[0], Settings(41, num_draft=n), row_key(0, 0)) for n in (3, "auto"))
    engine.insert([fixed, free])
    while engine.rows:
        engine.step()
    assert fixed.stats.speculation.steps_by_length == [1, 0, 0, 10]
    assert free.stats.target_calls < fixed.stats.target_calls


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_nothing_of_it_runs_where_a_number_is_given(temp, monkeypatch):
    model, ran = target(), []
    for name in ("limits", "note", "learn"):
        monkeypatch.setattr(Adaptive, name, lambda *args, name=name: ran.append(name))
    for name in ("costs", "fixed"):
        monkeypatch.setattr(Adaptive, name, property(lambda self, name=name: ran.append(name)))
    for draft in drafters(model).values():
        SpeculativeDecoder(model, draft, None, 3).generate(SOURCES, max_tokens=9, temp=temp)
    assert ran == []


def test_costs_are_measured_once_and_before_the_first_row(monkeypatch):
    asked = []

    def measured(target, draft):
        asked.append(draft)
        return CHEAP

    monkeypatch.setattr("decoder.measure", measured)
    model = target()
    decoder = SpeculativeDecoder(model, drafters(model)["good"], None, 4)
    decoder.generate(SOURCES[0], 4)
    assert asked == []
    list(decoder.results([], num_draft="auto"))
    assert asked == [decoder.drafter.model]
    decoder.generate(SOURCES, max_tokens=4, num_draft="auto", batch_size=3)
    assert len(asked) == 1


def test_auto_without_a_draft_is_regular_decoding():
    model = target()
    result = SpeculativeDecoder(model, None, None, "auto").generate(SOURCES[1], max_tokens=9)
    assert (result.tokens, result.finish_reason) == greedy(model, SOURCES[1], 9)
    assert result.stats.drafted == 0
