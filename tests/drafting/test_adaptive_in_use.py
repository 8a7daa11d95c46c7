"""Tests how many tokens an engine proposes with "auto", on fake models."""

import pytest

from fake_model import EOS, FakeModel, contrary, drafter, good, random_table, without
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.drafting.adaptive import Adaptive
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.model import load
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings
from simulated_decoding import COSTS, Table

ENDLESS = FakeModel(without(random_table(7), EOS), 7)
SOURCE = [2, 3, 4, 5, 6, 2]
PAIR = "target", "draft"
PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)
DRAFTS = {
    "perfect": drafter(ENDLESS.table, ENDLESS),
    "good": drafter(good(ENDLESS.table), ENDLESS),
    "never right": drafter(contrary(ENDLESS.table), ENDLESS),
}
CHEAP = Table(0.01, lambda n: 1 + 0.005 * (n - 1))


class Ticks:
    """A clock on which every step takes a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def auto(draft, prices, **options):
    decoder = SpeculativeDecoder(ENDLESS, DRAFTS.get(draft), clock=Ticks(), **options)
    decoder.adaptive = Adaptive(prices.fresh())
    if draft == "never right":
        decoder.adaptive.costs.update = lambda *_: None  # keeps the table of costs
    return decoder


def test_auto_is_the_default_number_of_proposals():
    assert SpeculativeDecoder(ENDLESS, SourceCopy()).defaults.num_draft == "auto"
    decoder = SpeculativeDecoder(ENDLESS, SourceCopy(), num_draft=3)
    assert decoder.request(num_draft=None).settings.num_draft == 3


@pytest.mark.parametrize("settings", [{"temp": 1.0}, {"delta": 0.5}])
def test_earlier_texts_do_not_change_a_sampled_or_lenient_text(settings):
    decoder = auto("good", COSTS["a CPU"])
    first = decoder.generate(SOURCE, max_tokens=30, **settings)
    assert first.stats.drafted
    decoder.generate([[5], [3, 3], [6, 5, 4, 3]] * 4, max_tokens=30)
    assert decoder.generate(SOURCE, max_tokens=30, **settings).tokens == first.tokens
    beside = decoder.generate([SOURCE, [5], [3, 3]], max_tokens=30, **settings)
    assert beside[0].tokens == first.tokens


def test_good_proposals_are_requested_and_bad_ones_are_not():
    assert auto("perfect", CHEAP).generate(SOURCE, 60).stats.tokens_per_call > 5
    assert auto("never right", COSTS["a CPU"]).generate(SOURCE, 60).stats.drafted < 30
    assert auto("none", CHEAP).generate(SOURCE, 9).stats.drafted == 0


@pytest.mark.parametrize(
    "other",
    [
        "def main(argv): return [x for x in sorted(argv) if x.startswith('--')]",
        "zxq vbn 4711 qwrt; lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do",
    ],
)
def test_a_text_is_drafted_from_its_first_step_after_one_of_another_kind(other, costs_of_a_cpu):
    (target, tokenizer), (draft, _) = (load(BUNDLED / name, "float32") for name in PAIR)
    decoder, fresh = (
        SpeculativeDecoder(target, draft, tokenizer, clock=lambda: 0.0) for _ in range(2)
    )
    assert decoder.generate(other).stats.acceptance_rate < 0.2
    after, alone = (d.generate(PROMPT).stats.target_calls for d in (decoder, fresh))
    assert after <= alone + 3


def test_a_draft_that_is_not_asked_is_not_called_and_catches_up_in_one_pass():
    target = FakeModel(without(random_table(7), EOS), 7)
    proposer = drafter(contrary(target.table), target)
    decoder = SpeculativeDecoder(target, proposer)
    decoder.adaptive = Adaptive(COSTS["a CPU"].fresh())
    decoder.adaptive.costs.update = lambda *_: None  # keeps the table of costs
    stats = decoder.generate(SOURCE, 200).stats
    calls = proposer.model.calls
    assert len(calls) == stats.drafted < 60, "one pass a proposal"
    assert max(len(tokens[0]) for _, tokens in calls) > 5


def test_a_row_that_joins_a_resting_batch_proposes_at_once():
    engine = auto("never right", COSTS["a CPU"]).engine(Settings())
    settings = Settings(60, num_draft="auto")
    engine.insert([Row(SOURCE, settings, row_key(0, 0))])
    while not engine.idle:
        engine.step()
    expected = Row([5], settings, row_key(0, 1), prediction=[2, 3, 4])
    engine.insert([expected])
    engine.step()
    assert expected.stats.speculation.copied


def test_a_row_with_a_fixed_number_keeps_it_beside_auto_rows():
    engine = auto("perfect", CHEAP).engine(Settings(num_draft="auto"))
    fixed, free = (Row(SOURCE, Settings(41, num_draft=n), row_key(0, 0)) for n in (3, "auto"))
    engine.insert([fixed, free])
    while engine.rows:
        engine.step()
    assert fixed.stats.speculation.steps_by_length == [1, 0, 0, 10]
    assert free.stats.target_calls < fixed.stats.target_calls


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_nothing_is_learned_where_a_number_is_given(temp):
    good_draft = DRAFTS["good"]
    for draft, copy in ((good_draft, None), (None, SourceCopy()), (good_draft, SourceCopy())):
        decoder = SpeculativeDecoder(ENDLESS, draft, None, 3, copy=copy)
        assert decoder.generate(SOURCE, max_tokens=9, temp=temp).stats.drafted
        assert not decoder.adaptive.greedy.counts
        assert not decoder.adaptive.costs.errors


def test_sampled_rows_learn_from_rows_of_their_call():
    decoder, call = auto("never right", COSTS["a CPU"]), {"max_tokens": 9, "temp": 1.0}
    alone, again = (decoder.generate(SOURCE, **call).stats.drafted for _ in range(2))
    assert alone == again > 0
    drafted = [r.stats.drafted for r in decoder.generate([SOURCE] * 9, batch_size=1, **call)]
    assert drafted[0] == alone > drafted[-1]


def test_a_draft_that_is_not_asked_does_not_read_the_source(monkeypatch):
    target = FakeModel(without(random_table(7), EOS), 7)
    proposer = drafter(target.table, target)
    decoder = SpeculativeDecoder(target, proposer)
    decoder.adaptive = Adaptive(COSTS["a CPU that pays for every position"].fresh())
    monkeypatch.setattr(decoder.adaptive.costs, "update", lambda *_: None)
    monkeypatch.setattr(proposer.model, "encode", pytest.fail)
    assert decoder.generate(SOURCE, 50).stats.drafted == 0


def test_a_draft_without_memory_to_read_the_source_reads_it_later(monkeypatch):
    target = FakeModel(without(random_table(7), EOS), 7)
    decoder = SpeculativeDecoder(target, drafter(target.table, target))
    prompts = [SOURCE, SOURCE[1:], SOURCE[2:]]
    expected = SpeculativeDecoder(target).generate(prompts, 9)
    model, failures = decoder.draft.model, [RuntimeError("[malloc] Unable to allocate")]
    encode = model.encode

    def failing(*args):
        if failures:
            raise failures.pop()
        return encode(*args)

    monkeypatch.setattr(model, "encode", failing)
    results = decoder.generate(prompts, 9)
    assert not failures and [r.tokens for r in results] == [r.tokens for r in expected]
    assert all(r.stats.target_calls < 9 for r in results), "the draft proposed later"
