"""Tests the chosen numbers of proposals and their time, with tables of costs and patterns."""

import numpy as np
import pytest

from fake_model import EOS
from mlx_t5.drafting.adaptive import AcceptanceStats, Adaptive
from mlx_t5.drafting.costs import MOST, NUMBERS
from mlx_t5.drafting.draft_model import DRAFT
from mlx_t5.drafting.proposals import Copy
from mlx_t5.drafting.source_copy import COPY, WEAK_COPY
from mlx_t5.engine.rows import Row
from mlx_t5.settings import Settings
from simulated_decoding import COSTS, Line, Simulation, Table, patterns

NOISE = 0.2  # standard deviation of the logarithm of a step's seconds
# The cost of a draft pass, and v at 1 to 8 positions, as measured or published.
MACHINES = {
    "H100, t5-large": (0.30, (1, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35)),
    "CPU, MKL": (0.10, (1, 1.17, 1.6, 2.0, 2.18, 2.4, 2.5, 2.65)),
    "M3, 4 bits": (0.12, (1, 1.1, 1.2, 1.3, 1.4, 1.8, 1.9, 2.2)),
    "M1, affine": (0.12, (1, 1.8, 2.6, 3.4, 4.2, 4.4, 4.4, 4.4)),
    "M1, bfloat16": (0.12, (1, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2)),
}


def table(machine, wrong=lambda positions, passes: 1.0):
    draft, v = MACHINES[machine]
    return Table(draft, lambda n: float(np.interp(n, range(1, 9), v)) + max(n - 8, 0) * 0.1, wrong)


def lines(alphas, tokens, seed, kind=DRAFT):
    rng = np.random.default_rng(seed)
    return [Line({kind: rng.random(tokens) < alpha}) for alpha in alphas]


def over_the_best(table, make, seeds=8, before=0):
    """Returns the mean time of the lines `make(seed)` relative to the best fixed number.

    The same learner has decoded `before` texts already.
    """
    auto, fixed = 0.0, np.zeros(8)
    for seed in range(seeds):
        simulation = Simulation(table, 7, NOISE, seed)
        for earlier in range(before):
            simulation.auto(make(1000 * (earlier + 1) + seed))
        auto += simulation.auto(make(seed))
        fixed += [simulation.fixed(make(seed), gamma) for gamma in range(8)]
    return auto / fixed.min()


@pytest.mark.slow
@pytest.mark.parametrize("before, most", [(0, 1.25), (4, 1.15)], ids=["first text", "fifth text"])
@pytest.mark.parametrize("machine", MACHINES)
def test_adaptive_decoding_is_hardly_slower_than_the_best_fixed_number(machine, before, most):
    over = [
        over_the_best(table(machine), lambda s, a=alpha: lines([a], 60, s), 3, before)
        for alpha in (0.0, 0.3, 0.6, 0.8, 0.95)
    ]
    assert max(over) <= most
    assert np.mean(over) <= 1 + (most - 1) / 2


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize("machine", ["H100, t5-large", "CPU, MKL", "M3, 4 bits"])
def test_rows_with_different_acceptance_rates_share_a_step(machine, rows):
    alphas = np.linspace(0.0, 0.95, rows)
    assert over_the_best(table(machine), lambda seed: lines(alphas, 60, seed), 2) <= 1.12


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("factor", [1.5, 1 / 1.5], ids=["too cheap", "too dear"])
def test_a_table_that_is_wrong_by_half_is_corrected(machine, factor):
    def wrong(positions, passes):  # steps with a draft take up to half more or less time
        return factor ** min((positions - 1) / 4, 1)

    for alpha in (0.0, 0.6, 0.95):
        make = lambda s, a=alpha: lines([a], 200, s)  # noqa: E731
        assert over_the_best(table(machine, wrong), make, 4) <= 1.3


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_change_in_mid_text_is_noticed(machine):
    def make(seed):
        rng = np.random.default_rng(seed)
        return [Line({DRAFT: np.concatenate([rng.random(200) < a for a in (0.95, 0, 0.95)])})]

    assert over_the_best(table(machine), make, 3) <= 1.1


@pytest.mark.parametrize("good", [DRAFT, COPY])
@pytest.mark.parametrize("machine", ["a GPU", "a CPU"])
def test_the_better_of_two_kinds_is_found(machine, good):
    bad = COPY if good is DRAFT else DRAFT
    right = {good: patterns(600)["nine of ten"], bad: patterns(600, 1)["one of ten"]}
    simulation = Simulation(COSTS[machine])
    took = simulation.auto([Line(right)])
    assert took <= 1.1 * simulation.best(lambda: [Line(right)], good)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_useless_draft_is_left_alone_but_tried_now_and_then(machine, sampled):
    simulation = Simulation(table(machine), 7)
    took = simulation.auto([Line({DRAFT: np.zeros(600, bool)}, sampled=sampled)])
    assert took <= 1.08 * 600
    assert sum(n > 0 for (n,) in simulation.chosen[-60:]) >= 2


def test_nothing_is_tried_if_even_a_perfect_draft_would_not_pay():
    simulation = Simulation(COSTS["a CPU that pays for every position"])
    assert simulation.auto([Line({DRAFT: np.ones(600, bool)})]) == 600


def test_a_regular_step_measured_in_a_slow_moment_does_not_make_a_useless_draft_pay():
    simulation = Simulation(table("CPU, MKL"), 7)
    for _ in range(2):
        simulation.table.update(1, 0, 0, 10.0)
    simulation.auto([Line({DRAFT: np.zeros(300, bool)})])
    assert sum(n == 0 for (n,) in simulation.chosen) >= 250


@pytest.mark.parametrize("machine", MACHINES)
def test_a_text_does_not_inherit_the_rest_that_another_kind_of_text_earned(machine):
    simulation = Simulation(table(machine), 7)
    simulation.auto([Line({DRAFT: np.zeros(30, bool)})])
    steps = len(simulation.chosen)
    simulation.auto([Line({DRAFT: np.ones(30, bool)})])
    assert simulation.chosen[steps][0] > 0
    if machine != "M1, affine":  # there a draft hardly pays
        assert len(simulation.chosen) - steps <= 12


def test_more_rows_get_fewer_proposals():
    def chosen(rows):
        simulation = Simulation(COSTS["a CPU"])
        simulation.auto(lines([0.9] * rows, 100, 0))
        return max(simulation.chosen[20])

    assert chosen(1) > chosen(8) > 0


def test_a_row_with_poor_acceptance_does_not_slow_down_other_rows():
    """Its drafts are rejected, but proposing them beside other rows costs no extra pass."""
    simulation = Simulation(Table(0.05, lambda n: 1.0))
    simulation.auto(lines([0.95, 0.95, 0.95, 0.0], 200, 0))
    assert np.mean([max(step) for step in simulation.chosen[10:40]]) > 4


# ---- rows that sample ----------------------------------------------------------------------------


def numbers(line, table=COSTS["a CPU"], beside=(), noise=0.0):
    """Returns the number of proposals of the first row in each step."""
    simulation = Simulation(table, 7, noise)
    simulation.auto([line, *beside])
    return [step[0] for step in simulation.chosen]


SLOW = Table(0.1, COSTS["a CPU"].verify, lambda positions, passes: 1 + positions)


@pytest.mark.parametrize("how", [{"sampled": True}, {"delta": 0.3}])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.9])
def test_a_sampled_or_lenient_row_does_not_choose_by_the_clock(alpha, how):
    right = np.random.default_rng(3).random(60) < alpha
    line = lambda: Line({DRAFT: right}, **how)  # noqa: E731
    assert numbers(line(), SLOW, noise=NOISE) == numbers(line())


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.9])
def test_a_lenient_row_chooses_by_its_own_acceptances(alpha):
    right = np.random.default_rng(3).random(60) < alpha
    line = lambda: Line({DRAFT: right}, delta=0.3)  # noqa: E731
    neighbors = [*lines([0.95] * 3, 300, 1), Line({DRAFT: ~np.zeros(300, bool)}, sampled=True)]
    alone = numbers(line())
    assert numbers(line(), beside=neighbors)[: len(alone)] == alone


def test_sampled_rows_learn_from_each_other_but_not_from_greedy_rows():
    def row_beside(sampled, alpha):
        neighbors = [Line(line.right, sampled=sampled) for line in lines([alpha] * 3, 60, 1)]
        return numbers(Line({DRAFT: np.arange(60) % 2 == 0}, sampled=True), beside=neighbors)

    assert row_beside(True, 0.0) != row_beside(True, 0.95)
    assert row_beside(False, 0.0)[:10] == row_beside(False, 0.95)[:10]


# ---- its parts -----------------------------------------------------------------------------------


def test_a_text_without_rejections_believes_other_texts_only_if_they_went_well():
    own = AcceptanceStats()
    own.counts[DRAFT] += (4, 0)

    def tokens(*others):
        shared = AcceptanceStats()
        shared.counts[DRAFT] += own.counts[DRAFT] + others
        return own.expected_tokens(DRAFT, MOST, shared)[4]

    assert tokens(0, 90) == tokens(0, 0), "another kind of text"
    assert tokens(80, 20) < tokens(0, 0)


def test_expected_tokens_are_those_of_a_beta_distribution():
    def expected(most, accepted, rejected):
        own = AcceptanceStats()
        own.counts[DRAFT] += (accepted, rejected)
        return own.expected_tokens(DRAFT, most, AcceptanceStats())

    a, b = DRAFT.accepted + 1.5, DRAFT.rejected + 1.1
    alphas = np.random.default_rng(0).beta(a, b, 400_000)
    drawn = [sum(np.mean(alphas**i) for i in range(n + 1)) for n in NUMBERS[:8]]
    assert expected(9, 1.5, 1.1)[:8] == pytest.approx(drawn, rel=0.01)
    assert expected(1, 1.5, 1.1)[1:] == pytest.approx([1 + a / (a + b)] * (len(NUMBERS) - 1))


NOTHING = Copy(COPY, ())


def counted(drafted, copy, accepted, written, **end):
    """Returns the accepted and rejected proposals that a row and all greedy rows have seen."""
    adaptive, seen = Adaptive(COSTS["a CPU"].fresh()), row("auto")
    for name, value in end.items():
        setattr(seen, name, value)
    adaptive.update(seen, copy, drafted, written, accepted)
    both = seen.acceptance, adaptive.greedy
    own, common = (tuple(sum(stats.counts.values(), np.zeros(2))) for stats in both)
    assert own == common
    return own


@pytest.mark.parametrize(
    ("proposed", "accepted", "written", "ended", "counts"),
    [
        (5, 5, 6, False, (5, 0)),  # all kept, and one token of the target's
        (5, 0, 1, False, (0, 1)),
        (5, 2, 3, False, (2, 1)),  # the third is rejected, the last two are not judged
        (5, 3, 3, True, (3, 1)),  # the third is the end token, and two proposals follow it
        (3, 3, 3, True, (3, 0)),  # the end token is the last proposal
        (3, 2, 3, True, (2, 1)),  # the target ends the text instead
    ],
)
def test_verified_proposals_are_counted(proposed, accepted, written, ended, counts):
    end = {"ended": ended, "finish_reason": "stop" if ended else None}
    assert counted(proposed, NOTHING, accepted, [7] * written, **end) == counts


@pytest.mark.parametrize(
    ("copy", "written", "counts"),
    [
        ([1, 2, 3], [1, 2, 9], (2, 1)),
        ([1, 2, 3], [1, 2], (2, 0)),  # nothing is known of the third
        ([1], [1, 5], (1, 0)),
        ([7], [1, 5], (0, 1)),
        ([7], [], (0, 0)),
    ],
)
def test_copies_are_compared_with_the_written_tokens(copy, written, counts):
    assert counted(0, Copy(COPY, copy), 0, written) == counts
    assert counted(0, Copy(COPY, copy), 0, [*written, EOS], ended=True) == counts


def row(num_draft, decided=0, max_tokens=20, **settings):
    settings = Settings(max_tokens, num_draft=num_draft, **settings)
    return Row([2], settings, None, tokens=[0] * (decided + 1))


def test_a_given_number_is_proposed_up_to_the_end_of_text_or_copy():
    adaptive = Adaptive(COSTS["a CPU"].fresh())
    copied, weak = Copy(COPY, [3, 4]), Copy(WEAK_COPY, [3, 4])

    def choice(row, copy=NOTHING, unread=(0,)):
        """Returns the row's copied tokens and its number of drafted tokens."""
        plan = adaptive.choose([row], [copy], unread)
        return list(*plan.copies), *plan.drafted

    assert choice(row(3)) == ([], 3)
    assert choice(row(30)) == ([], 19)
    assert choice(row(3, decided=18)) == ([], 1)
    assert choice(row(3, decided=19)) == choice(row(0)) == ([], 0)
    assert choice(row(3), unread=None) == ([], 0)
    assert choice(row(3), copied) == ([3, 4], 0)
    assert choice(row(3), weak) == ([], 3)
    assert choice(row(3), weak, unread=None) == ([3, 4], 0)
    assert choice(row(1, temp=1.0)) == ([], 1)
