"""`num_draft="auto"` in the engine: the same laws, whatever the pacer chooses."""

from types import SimpleNamespace

import pytest

from decoder import SpeculativeDecoder
from draft_length import LONGEST, Costs, StepCosts
from engine import Engine
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
from pacer import Pacer
from results import Row, Settings
from sampling import row_key
from simulated_decoding import COSTS, costs
from source_copy import CopyOrDraft, SourceCopy

V = 7
SOURCES = [[5], [2, 3, 4, 5, 6, 2], [3, 3], [6, 5, 4, 3]]
CHEAP = costs(0.01, lambda n: 1 + 0.005 * (n - 1))
LINEAR = Costs((StepCosts(1, 0.0, tuple(float(n) for n in range(1, LONGEST + 2))),))
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
    engine = Engine(model, drafters(model)[kind], pacer=Pacer(COSTS["a CPU"], 4))
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
    assert len(lengths) > 1, "the choice never changed"


@pytest.mark.parametrize("kind", ["good", "never right", "copy or draft"])
def test_a_sampled_row_does_not_depend_on_its_neighbours(kind):
    model = FakeModel(without(random_table(V), EOS), V)
    options = {"max_tokens": 40, "temp": 1.0, "batch_size": 2}

    def texts(sources, seeds):
        results = auto(model, drafters(model)[kind], COSTS["a CPU"]).generate(
            sources, seed=seeds, **options
        )
        return [result.tokens for result in results]

    one, two = texts([SOURCES[0], SOURCES[1]], [4, 5]), texts([SOURCES[0], SOURCES[3]], [4, 9])
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_what_was_decoded_before_does_not_change_a_sampled_text():
    model = FakeModel(without(random_table(V), EOS), V)
    decoder = auto(model, drafters(model)["never right"], COSTS["a CPU"])
    first = decoder.generate(SOURCES[0], max_tokens=30, temp=1.0)
    decoder.generate(SOURCES, max_tokens=30)
    assert (
        decoder.history.of(()).estimates["draft"].kept
        < decoder.history.of(()).estimates["draft"].judged
    )
    assert decoder.generate(SOURCES[0], max_tokens=30, temp=1.0).tokens == first.tokens


def test_good_proposals_are_asked_for_and_bad_ones_are_not():
    model = FakeModel(without(random_table(V), EOS), V)
    perfect = auto(model, drafters(model)["the target itself"]).generate(SOURCES[0], 60).stats
    assert perfect.tokens_per_call > 8
    assert perfect.speculation.switched_off is None
    decoder = auto(model, drafters(model)["never right"], COSTS["a CPU"])
    useless = decoder.generate(SOURCES[0], max_tokens=60).stats
    assert useless.drafted < 30
    assert useless.speculation.switched_off.startswith("too few proposals are kept")
    costly = auto(model, drafters(model)["the target itself"], LINEAR)
    stats = costly.generate(SOURCES[0], max_tokens=9).stats
    assert stats.drafted == 0
    assert stats.speculation.switched_off.startswith("proposals cost more than they can save")


def test_statistics_of_a_perfect_draft():
    model = FakeModel(without(random_table(V), EOS), V)
    ticks = iter(range(0, 1000, 2))
    stats = (
        auto(model, drafters(model)["the target itself"], clock=lambda: next(ticks))
        .generate(SOURCES[0], max_tokens=33)
        .stats
    )
    explained = stats.speculation
    assert sum(explained.steps_by_length) == stats.target_calls
    assert sum(explained.drafted_by_position) == stats.drafted
    assert explained.accepted_by_position == explained.drafted_by_position
    assert set(explained.acceptance_by_position) == {1.0}
    assert explained.alpha == {"draft": pytest.approx(1.0)}
    assert explained.c == pytest.approx(0.01)
    assert 1 < explained.verify_cost < 1.1
    assert explained.switched_off is None
    assert explained.predicted_speedup > 3
    # A regular step takes 1 second in the table; a step took 2 on the clock.
    assert explained.real_speedup == pytest.approx(stats.tokens_per_call / 2)


def test_statistics_of_a_fixed_number():
    model = FakeModel(without(random_table(V), EOS), V)
    decoder = SpeculativeDecoder(model, drafters(model)["never right"], None, 3)
    explained = decoder.generate(SOURCES[0], max_tokens=6).stats.speculation
    assert explained.steps_by_length == [1, 1, 1, 3]
    assert explained.drafted_by_position == [5, 4, 3]
    assert explained.accepted_by_position == [0, 0, 0]
    assert explained.acceptance_by_position == [0.0, 0.0, 0.0]
    assert explained.alpha == {"draft": 0.0}
    assert (explained.c, explained.predicted_speedup, explained.switched_off) == (None,) * 3


def test_a_row_with_a_number_of_its_own_keeps_it_beside_rows_without():
    model = FakeModel(without(random_table(V), EOS), V)
    engine = Engine(model, drafters(model)["the target itself"], pacer=Pacer(CHEAP, 2))
    fixed, free = (Row(SOURCES[0], Settings(41, num_draft=n), row_key(0, 0)) for n in (3, "auto"))
    engine.insert([fixed, free])
    while engine.rows:
        engine.step()
    assert fixed.stats.speculation.steps_by_length == [1, 0, 0, 10]
    assert free.stats.target_calls < fixed.stats.target_calls


def test_while_all_rows_rest_nobody_looks_and_a_row_with_a_number_never_rests(monkeypatch):
    model = FakeModel(without(random_table(V), EOS), V)
    looked = []
    offers = SourceCopy.offers

    def watched(self, committed, limits, resting=()):
        looked.append([i for i in range(len(committed)) if i not in resting])
        return offers(self, committed, limits, resting)

    monkeypatch.setattr(SourceCopy, "offers", watched)
    auto_row, fixed = (
        Row([5, 5, 5], Settings(40, num_draft=n), row_key(0, 0)) for n in ("auto", 2)
    )
    for rows in ([auto_row], [auto_row, fixed]):
        looked.clear()
        engine = Engine(model, SourceCopy(), pacer=Pacer(LINEAR, len(rows)))
        engine.insert([Row(row.ids, row.settings, row.key) for row in rows])
        steps = 0
        while engine.rows and steps < 30:
            engine.step()
            steps += 1
        if fixed in rows:
            assert all(1 in each for each in looked) and len(looked) > 10
            assert sum(0 in each for each in looked) < len(looked)
        else:
            # After looking in vain in the first step: rests of 1, 2, 4, 8 and 16 steps.
            assert (steps, looked) == (30, [[0]] * 5)


def test_what_was_learned_is_kept_by_task_prefix():
    model = FakeModel(without(random_table(V), EOS), V)
    decoder = auto(model, drafters(model)["good"])
    pieces = {2: "▁do", 4: ":"}
    decoder.tokenizer = SimpleNamespace(
        convert_ids_to_tokens=lambda token: pieces.get(token, "▁word"),
        decode=lambda tokens, **_: "",
    )
    decoder.generate([[2, 4, 3], [3, 3]], max_tokens=12)
    assert decoder.history.of((2, 4)).estimates["draft"].judged > 0
    assert decoder.history.of(()).estimates["draft"].judged > 0
    assert decoder.history.of((2,)).estimates == {}


def test_costs_are_measured_for_one_row_and_for_a_full_batch_once(monkeypatch):
    asked = []

    def measured(target, draft, rows, settings):
        asked.append((rows, settings.temp))
        return CHEAP

    monkeypatch.setattr("decoder.measure_costs", measured)
    model = target()
    decoder = SpeculativeDecoder(model, drafters(model)["good"], None, "auto")
    for _ in range(2):
        decoder.generate(SOURCES[:3], max_tokens=4)
    decoder.generate(SOURCES[0], max_tokens=4)
    list(decoder.results(iter(SOURCES), max_tokens=4, batch_size=2, temp=0.5))
    assert asked == [([1, 8], 0.0), ([1], 0.0), ([1, 8], 0.5)]
    SpeculativeDecoder(model, drafters(model)["good"], None, 4).generate(SOURCES[0], 4)
    assert len(asked) == 3
    for count in range(1, 10):
        decoder.generate([SOURCES[0]] * count, max_tokens=2, batch_size=9)
    assert asked[3:] == [([1, 16], 0.0)]


def test_auto_without_a_draft_is_regular_decoding():
    model = target()
    result = SpeculativeDecoder(model, None, None, "auto").generate(SOURCES[1], max_tokens=9)
    assert (result.tokens, result.finish_reason) == greedy(model, SOURCES[1], 9)
    assert result.stats.drafted == 0
    assert result.stats.speculation.switched_off is None
