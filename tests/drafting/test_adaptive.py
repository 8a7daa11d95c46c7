"""What `num_draft="auto"` chooses and what that costs, by tables of costs and patterns."""

import numpy as np
import pytest

from decoder import SpeculativeDecoder
from fake_model import EOS, FakeModel, contrary, drafter, good, random_table, without
from mlx_t5.drafting.adaptive import Adaptive, compare, count_verified, proposal_limits
from mlx_t5.drafting.costs import LONGEST, LONGEST_ON_METAL, Costs
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings
from published_costs import H100, PUBLISHED, T5_11B, T5_LARGE, pair
from simulated_decoding import COSTS, Simulation, costs, patterns

TOKENS = 600


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "copy"])
@pytest.mark.parametrize("pattern", patterns(1))
@pytest.mark.parametrize("machine", COSTS)
def test_close_to_the_best_fixed_number_and_never_much_slower_than_none(machine, pattern, kind):
    auto, fixed = 0.0, [0.0] * (LONGEST + 1)
    for seed in range(2):
        simulation = Simulation(COSTS[machine], **{kind: patterns(TOKENS, seed)[pattern]})
        auto += simulation.auto()[0]
        fixed = [total + simulation.fixed(g, kind) for g, total in enumerate(fixed)]
    assert auto <= 1.05 * min(fixed)
    assert auto <= 1.05 * fixed[0]


APPLE = {
    f"{name}, c = {c}": pair(PUBLISHED[name], c)
    for name in ("4 bits, M4 Pro", "4 bits, M5 Max", "bf16, matrix kernel from 2", "fp16, M1 Max")
    for c in (T5_11B, T5_LARGE)
}
GPUS = {name: (costs, LONGEST) for name, costs in H100.items()}
GPUS |= {name: (costs, LONGEST_ON_METAL) for name, costs in APPLE.items()}


def against_the_best_fixed_number(gpu, alpha, seeds):
    """Cost of twelve texts of 40 tokens, by a process that has seen none, relative to it."""
    auto, (costs, longest) = 0.0, GPUS[gpu]
    fixed = [0.0] * (longest + 1)
    for seed in range(seeds):
        right = np.random.default_rng(seed).random(12 * 40) < alpha
        simulation = Simulation(costs, right, text=40, longest=longest)
        auto += simulation.auto()[0]
        fixed = [total + simulation.fixed(g) for g, total in enumerate(fixed)]
    return auto / min(fixed)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.85, 0.93])
@pytest.mark.parametrize("gpu", GPUS)
def test_within_5_percent_of_the_best_fixed_number_on_gpus(gpu, alpha):
    assert against_the_best_fixed_number(gpu, alpha, seeds=4) <= 1.05


@pytest.mark.parametrize("alpha", [0.7, 0.85])
def test_a_draft_that_pays_is_not_given_up_after_bad_luck(alpha):
    """A pass over two positions costs as much as one over eight, so one proposal never pays."""
    unlucky = "bf16, matrix kernel from 2, c = 0.1"
    assert against_the_best_fixed_number(unlucky, alpha, seeds=12) <= 1.05


@pytest.mark.parametrize("good", ["draft", "copy"])
@pytest.mark.parametrize("machine", ["a GPU", "a CPU"])
def test_of_two_kinds_the_better_one_is_found(machine, good):
    bad = "copy" if good == "draft" else "draft"
    right = {good: patterns(TOKENS)["nine of ten"], bad: patterns(TOKENS, 1)["one of ten"]}
    simulation = Simulation(COSTS[machine], **right)
    cost, chosen = simulation.auto()
    assert cost <= 1.1 * min(simulation.fixed(g, good) for g in range(LONGEST + 1))
    assert [kind for kind, _ in chosen[20:]].count(good) > 0.9 * len(chosen[20:])


def test_a_change_is_noticed():
    _, chosen = Simulation(COSTS["a CPU"], draft=patterns(1200)["alternating"]).auto()
    lengths = [length for _, length in chosen]
    off = [i for i, n in enumerate(lengths) if n == 0]
    assert min(lengths[: off[0]][:5]) > 2, "the good beginning"
    assert len(off) > 300, "two bad stretches of 300 tokens"
    assert max(lengths[off[100] :]) > 2, "the good stretch between them"


def test_what_does_not_pay_is_looked_for_and_tried_now_and_then_only():
    adaptive = Adaptive(lambda: COSTS["a CPU"], ["copy", "draft"])
    for _ in range(200):
        adaptive.learn((), "draft", 1, 0)
    adaptive.learn((), "copy", 100, 0)
    limits = [adaptive.limits((), 1) for _ in range(60)]
    assert sum("copy" in each for each in limits) == 15
    # A trial costs 0.3 of a step, and 3 % of the time may be spent on trials.
    assert [i for i, each in enumerate(limits) if each["draft"]] == [10, 21, 32, 43, 54]
    hopeless = Adaptive(lambda: COSTS["a CPU that pays for every position"], ["draft"])
    assert {hopeless.limits((), 1)["draft"] for _ in range(200)} == {0}


def test_tasks_learn_apart():
    adaptive = Adaptive(lambda: COSTS["a CPU"], ["draft"])
    for _ in range(60):
        adaptive.learn((1,), "draft", 1, 0)
    assert adaptive.limits((1,), 1) == {"draft": 0}
    assert adaptive.limits((2,), 1)["draft"] > 2


def test_a_sampled_row_takes_the_same_numbers_whatever_was_learned():
    adaptive = Adaptive(lambda: COSTS["a GPU"], ["copy", "weak copy", "first copy", "draft"])
    before = adaptive.fixed
    for _ in range(60):
        adaptive.learn((), "draft", 1, 0)
    assert Adaptive(lambda: COSTS["a GPU"], adaptive.kinds).fixed == before
    assert adaptive.fixed == before
    assert before["draft"] > 2
    # Where verifying is nearly free, copies on which little depends pay as well.
    flat = Adaptive(lambda: costs(0.0, lambda n: 1.0), ["copy", "weak copy", "first copy"], LONGEST)
    assert min(flat.fixed.values()) > 5


def test_rows_of_a_batch_share_the_positions_of_a_pass():
    # The 16 positions of this machine cost the same, all further ones as much again each.
    table = Costs({1: 1.0, 16: 1.0, 32: 17.0}, {})
    adaptive = Adaptive(lambda: table, ["copy"])
    assert adaptive.limits((), 1)["copy"] == LONGEST
    assert adaptive.limits((), 4)["copy"] == 3
    assert adaptive.limits((), 16).get("copy", 0) == 0


@pytest.mark.parametrize(
    ("proposed", "accepted", "written", "ended", "counts"),
    [
        (5, 5, 6, False, (5, 5)),  # all kept, and the target's own
        (5, 0, 1, False, (1, 0)),
        (5, 2, 3, False, (3, 2)),  # the third rejected, the others not judged
        (5, 3, 3, True, (3, 2)),  # the third was the end token, and two stood behind it
        (3, 3, 3, True, (2, 2)),  # the end token was the last
        (3, 2, 3, True, (3, 2)),  # the target ended the text instead
        (0, 0, 1, False, (0, 0)),
    ],
)
def test_what_a_step_tells_about_proposals(proposed, accepted, written, ended, counts):
    assert count_verified(proposed, accepted, written, ended) == counts


@pytest.mark.parametrize(
    ("copy", "written", "counts"),
    [
        ([1, 2, 3], [1, 2, 9], (3, 2)),
        ([1, 2, 3], [1, 2], (2, 2)),  # nothing is known of the third
        ([1], [1, 5], (1, 1)),
        ([7], [1, 5], (1, 0)),
        ([7], [], (0, 0)),
    ],
)
def test_what_a_step_tells_about_copies(copy, written, counts):
    assert compare(copy, written) == counts


@pytest.mark.parametrize(("cpu", "number"), [(True, 5), (False, 4)])
def test_without_a_number_the_device_decides(cpu, number, monkeypatch):
    monkeypatch.setattr("mlx_t5.drafting.adaptive.cpu_only", lambda: cpu)
    model = FakeModel(random_table(5), 5)
    usual = SpeculativeDecoder(model, SourceCopy())
    assert usual.defaults.num_draft == number
    assert usual.codec.settings(usual.defaults, num_draft=None).num_draft == number
    given = SpeculativeDecoder(model, SourceCopy(), num_draft=3)
    assert given.codec.settings(given.defaults).num_draft == 3
    assert given.codec.settings(given.defaults, num_draft=None).num_draft == 3
    row = Row([2], Settings(max_tokens=20), None, committed=[0])
    (limits,) = proposal_limits([row], usual.drafter, usual.engine(usual.defaults).adaptive)
    assert set(limits.values()) == {number}


# ---- in the engine -------------------------------------------------------------------------------

ENDLESS = FakeModel(without(random_table(7), EOS), 7)
SOURCE = [2, 3, 4, 5, 6, 2]
DRAFTS = {
    "perfect": drafter(ENDLESS.table, ENDLESS),
    "good": drafter(good(ENDLESS.table), ENDLESS),
    "never right": drafter(contrary(ENDLESS.table), ENDLESS),
}
CHEAP = costs(0.01, lambda n: 1 + 0.005 * (n - 1))


def auto(draft, prices):
    return SpeculativeDecoder(ENDLESS, DRAFTS.get(draft), None, "auto", costs=prices)


@pytest.mark.parametrize("settings", [{"temp": 1.0}, {"delta": 0.5}])
def test_what_was_decoded_before_does_not_change_a_sampled_or_lenient_text(settings):
    decoder = auto("good", COSTS["a CPU"])
    first = decoder.generate(SOURCE, max_tokens=30, **settings)
    decoder.generate([[5], [3, 3], [6, 5, 4, 3]] * 4, max_tokens=30)
    assert decoder.generate(SOURCE, max_tokens=30, **settings).tokens == first.tokens


def test_good_proposals_are_asked_for_and_bad_ones_are_not():
    assert auto("perfect", CHEAP).generate(SOURCE, 60).stats.tokens_per_call > 8
    assert auto("never right", COSTS["a CPU"]).generate(SOURCE, 60).stats.drafted < 30
    linear = COSTS["a CPU that pays for every position"]
    assert auto("perfect", linear).generate(SOURCE, 9).stats.drafted == 0
    assert auto("none", CHEAP).generate(SOURCE, 9).stats.drafted == 0


def test_a_row_with_a_number_of_its_own_keeps_it_beside_rows_without():
    engine = auto("perfect", CHEAP).engine(Settings(num_draft="auto"))
    fixed, free = (Row(SOURCE, Settings(41, num_draft=n), row_key(0, 0)) for n in (3, "auto"))
    engine.insert([fixed, free])
    while engine.rows:
        engine.step()
    assert fixed.stats.speculation.steps_by_length == [1, 0, 0, 10]
    assert free.stats.target_calls < fixed.stats.target_calls


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_nothing_of_it_runs_where_a_number_is_given(temp, monkeypatch):
    ran = []
    for name in ("limits", "note", "learn"):
        monkeypatch.setattr(Adaptive, name, lambda *args, name=name: ran.append(name))
    for name in ("costs", "fixed"):
        monkeypatch.setattr(Adaptive, name, property(lambda self, name=name: ran.append(name)))
    for draft in (DRAFTS["good"], SourceCopy(), CopyOrDraft(SourceCopy(), DRAFTS["good"])):
        SpeculativeDecoder(ENDLESS, draft, None, 3).generate(SOURCE, max_tokens=9, temp=temp)
    assert ran == []


def test_costs_are_measured_once_and_before_the_first_row(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "mlx_t5.drafting.adaptive.measure", lambda _, draft: asked.append(draft) or CHEAP
    )
    decoder = SpeculativeDecoder(ENDLESS, DRAFTS["good"], None, 4)
    decoder.generate(SOURCE, 4)
    assert asked == []
    list(decoder.results([], num_draft="auto"))
    assert asked == [decoder.drafter.model]
    decoder.generate([SOURCE] * 4, max_tokens=4, num_draft="auto", batch_size=3)
    assert len(asked) == 1
