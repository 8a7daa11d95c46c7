"""Tests the laws of docs/how-it-is-built.md with every kind of proposals and settings.

The models are fakes whose cache is the list of their tokens; law 2 uses a real model. That
sampled text has the target's own distribution is in tests/sampling/test_distribution.py.
"""

from functools import cache

import pytest

from fake_model import EOS, FakeModel, drafter, greedy, random_table, small, without
from kinds import (
    NUMBERS,
    PRICES,
    RULES,
    SAMPLING,
    SOURCES,
    V,
    decoder_of,
    drafters,
    predictions_of,
    processed,
    rows,
    table_of,
)
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.rows import Row
from mlx_t5.sampling import draws
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings
from random_models import random_t5

pytestmark = pytest.mark.usefixtures("costs_of_a_cpu")
TARGET = FakeModel(table_of(), V)
DRAFTERS = drafters(TARGET)
FULL = ("none", "good", "copy or disagrees", "prediction")
FAST = ("good", "prediction")


def every_kind(names, every, few):
    """Parametrizes by kind of proposals; kinds in `FULL` get the cases `every`, others `few`."""
    cases = [(kind, *case) for kind in DRAFTERS for case in (every if kind in FULL else few)]
    slow = [() if kind in FAST else pytest.mark.slow for kind, *_ in cases]
    params = [pytest.param(*case, marks=marks) for case, marks in zip(cases, slow, strict=True)]
    return pytest.mark.parametrize(("kind", *names), params)


# Numbers of proposals of the rows, or the price of passes if the number is "auto".
EVERY_SAMPLING = [(sampling, number) for sampling in SAMPLING for number in ("given", "a CPU")]


def engine_of(kind, number):
    return decoder_of(TARGET, DRAFTERS[kind], 5 if number == "given" else number).engine(Settings())


def rows_of(sampling, number, kind="none"):
    return rows(sampling, NUMBERS if number == "given" else ["auto"] * 5, kind=kind)


def check_caches(engine):
    """Asserts that the caches of running rows hold exactly the committed tokens."""
    draft = engine.draft
    for i, row in enumerate(engine.rows):
        assert engine.cache.slots[i][: row.decided] == row.tokens[:-1]
        if draft and i < len(draft.fed) - len(draft.waiting):
            # The draft's last tokens may extend past the tokens that the target kept.
            true, ids = min(draft.fed[i], row.decided), draft.model.config.vocab_size
            known = [token if token < ids else 0 for token in row.tokens[:true]]
            assert draft.cache.slots[i][:true] == known


def finish(engine):
    while engine.rows:
        engine.step()
        check_caches(engine)


@every_kind(("sampling", "number"), EVERY_SAMPLING, [("mixed", "given"), ("lenient", "a CPU")])
def test_caches_hold_what_was_committed_and_rows_are_written_as_if_alone(kind, sampling, number):
    """Tests laws 1 and 6, with any proposals and any other rows in the batch."""
    engine, together = engine_of(kind, number), rows_of(sampling, number, kind)
    engine.insert(together[:2])
    for row in together[2:]:  # they join while other rows run, so all have different lengths
        engine.step()
        check_caches(engine)
        engine.insert([row])
    finish(engine)
    for row, alone in zip(together, rows_of(sampling, number, kind), strict=True):
        engine = engine_of(kind, number)
        engine.insert([alone])
        finish(engine)
        assert (alone.tokens, alone.finish_reason) == (row.tokens, row.finish_reason)
        # If numbers are chosen by earlier acceptance, greedy rows share what they learn.
        assert alone.origins == row.origins or number != "given"


def test_the_tested_batches_mix_writers_and_numbers():
    """Rows copy while other rows draft, and the chosen numbers change."""
    engine, mixed = engine_of("copy or good", "given"), rows_of("greedy", "given")
    engine.insert(mixed)
    TARGET.calls.clear()
    finish(engine)
    assert {origin for row in mixed for origin in row.origins} == {"copy", "draft", "target"}
    assert sum(row.stats.target_calls for row in mixed) > 1.5 * len(TARGET.calls)
    for sampling in SAMPLING:
        engine = engine_of("disagrees everywhere", "a CPU")
        engine.insert(rows_of(sampling, "a CPU"))
        TARGET.calls.clear()
        finish(engine)
        assert len({len(tokens[0]) for _, tokens in TARGET.calls}) > 1


class Waits:
    """Counts Python's waits for MLX arrays, in every way of waiting."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__iter__"):
            if hasattr(mx.array, name):
                monkeypatch.setattr(mx.array, name, self.counted(getattr(mx.array, name)))
        for name in ("eval", "synchronize"):  # async_eval does not wait
            monkeypatch.setattr(mx, name, self.counted(getattr(mx, name)))

    def counted(self, function):
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return counting


PROMPTS = [[7, 8, 9, 1], [30, 31, 1], list(range(20, 45)) + [1], [5, 1], [50, 2, 50, 2, 50, 1]]


@pytest.fixture(scope="module")
def pair():
    return random_t5(), small(random_t5(noise=0.1))


@pytest.mark.parametrize("number", [4, "auto"])
@pytest.mark.parametrize("rules", [{}, RULES["all"]], ids=["plain", "processed"])
@pytest.mark.parametrize(("temp", "candidates"), [(0.0, 1), (0.8, 1024), (0.8, 1)])
def test_one_wait_a_step_and_none_while_drafting(
    pair, temp, candidates, rules, number, monkeypatch, unchecked_indices
):
    """Tests law 2; as an exception, a step whose top-p candidates fall short waits twice."""
    monkeypatch.setattr(draws, "CANDIDATES", candidates)
    engine = SpeculativeDecoder(*pair, None, number).engine(Settings())
    settings = Settings(20, temp, top_p=0.9, num_draft=number, **rules)
    inserted = [Row(prompt, settings, row_key(0, i)) for i, prompt in enumerate(PROMPTS)]
    engine.insert(inserted)
    waits = Waits(monkeypatch)
    propose, while_drafting = engine.draft.propose, []

    def watched(*args):
        before = waits.count
        proposal = propose(*args)
        while_drafting.append(waits.count - before)
        return proposal

    monkeypatch.setattr(engine.draft, "propose", watched)
    steps, last_steps = 0, 0
    while running := len(engine.rows):
        engine.step()
        steps += 1
        last_steps += len(engine.rows) < running  # checks for a failed pass
    assert steps > last_steps > 1
    most = 2 * steps if temp and candidates == 1 else steps
    assert steps <= waits.count - last_steps <= most
    assert (waits.count - last_steps > steps) == (most > steps)
    assert while_drafting and not any(while_drafting)
    assert all(row.stats.drafted for row in inserted)


@every_kind((), [()], [()])
def test_no_token_is_fed_to_the_target_twice(kind):
    """Tests law 3: rejected tokens cost no further pass."""
    if kind == "none":
        pytest.skip("nothing is rejected")
    engine, expected = engine_of(kind, "given"), 0
    (row,) = inserted = rows(sources=SOURCES[:1], kind=kind)
    engine.insert(inserted)
    while engine.rows:
        engine.step()
        (offset,), (tokens,) = TARGET.calls[-1]
        assert offset == expected
        # The first token is the one committed token that the cache lacks.
        assert tokens[0] == row.tokens[offset]
        expected = row.decided


def test_equal_sources_are_encoded_once(monkeypatch, unpadded):
    """Tests law 4."""
    encoded, encode = [], TARGET.encode
    spied = lambda ids, mask: encoded.append(ids.tolist()) or encode(ids, mask)  # noqa: E731
    monkeypatch.setattr(TARGET, "encode", spied)
    options = {"temp": 1.0, "num_samples": 4, "max_tokens": 3}
    SpeculativeDecoder(TARGET).generate([SOURCES[1]], **options)
    assert encoded == [[SOURCES[1]]]


@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_draft", [1, 2, 4, 8])
def test_an_end_token_anywhere_ends_the_row_there(place, num_draft):
    """Tests law 5."""
    free = FakeModel(without(random_table(V), EOS), V)
    expected, _ = greedy(free, SOURCES[1], 9)

    def ending_here(source, seen):
        logits = free.table(source, seen).copy()
        logits[EOS] = 99 if len(seen) == place + 1 else -99
        return logits

    model = FakeModel(ending_here, V)
    # The draft knows the place, so EOS is among the accepted tokens, with more tokens after it.
    decoder = SpeculativeDecoder(model, drafter(ending_here, model), None, num_draft)
    result = decoder.generate(SOURCES[1], max_tokens=30)
    assert (result.tokens, result.finish_reason) == (expected[:place], "stop")
    # Every proposal is right, so only the last token of a full step is the target's own.
    stats, steps = result.stats, -(-(place + 1) // (num_draft + 1))
    assert stats.target_calls == steps
    assert stats.drafted == stats.accepted == place + 1 - (place + 1) // (num_draft + 1)
    assert stats.generated_tokens == place


TARGETS = {eos_bias: FakeModel(table_of(eos_bias), V) for eos_bias in (-9.0, -1.0, 1.5)}
TARGETS_DRAFTERS = {eos_bias: drafters(model) for eos_bias, model in TARGETS.items()}


@cache
def greedy_texts(eos_bias, rules, max_tokens):
    """Returns the texts of the target alone, decoded token by token."""
    alone = FakeModel(processed(TARGETS[eos_bias].table, RULES.get(rules, {})), V)
    return [greedy(alone, source, max_tokens) for source in SOURCES]


EVERY_NUMBER = [(number, "none") for number in (1, 3, 8, *PRICES)]
EVERY_NUMBER += [*((3, rules) for rules in RULES), ("a CPU", "all")]


@every_kind(("number", "rules"), EVERY_NUMBER, [(3, "none"), (3, "all"), ("a CPU", "all")])
def test_greedy_output_is_that_of_the_target_alone(kind, number, rules):
    """Tests law 7."""
    for eos_bias, model in TARGETS.items():
        decoder = decoder_of(model, TARGETS_DRAFTERS[eos_bias][kind], number)
        for max_tokens in (1, 2, 7, 20) if rules == "none" else (20,):
            options = {"max_tokens": max_tokens, "batch_size": 3, **RULES.get(rules, {})}
            options["prediction"] = [ids or None for ids in predictions_of(kind)]
            texts = [(r.tokens, r.finish_reason) for r in decoder.generate(SOURCES, **options)]
            assert texts == greedy_texts(eos_bias, rules, max_tokens)


@pytest.mark.parametrize("rules", RULES)
def test_the_tested_rules_change_the_texts(rules):
    assert any(greedy_texts(bias, rules, 20) != greedy_texts(bias, "none", 20) for bias in TARGETS)
