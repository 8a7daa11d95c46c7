"""What the pacer chooses and what that costs, on tables of costs and patterns of acceptance."""

import numpy as np
import pytest

from draft_length import LONGEST, Costs, StepCosts
from drafters import NOTHING, Offer
from pace import TASKS, History, Pace, Past
from pacer import HOLD, UNKNOWN_COSTS, Pacer
from simulated_decoding import COSTS, Simulation, costs, patterns, staircase

TOKENS = 600
DRAFT = Offer("draft", 99)


def asked(pacer, pace, offers=(DRAFT,)):
    return pacer.choose([pace], [offers])[0].length


def outcome(kept):
    return ([2] * (kept + 1), kept, False)


def learn(pacer, pace, length, kept, times=1):
    for _ in range(times):
        pacer.observe([pace], [[DRAFT]], [DRAFT.cut(length)], [outcome(kept)])
        pacer.learn([pace])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["draft", "copy"])
@pytest.mark.parametrize("pattern", patterns(1))
@pytest.mark.parametrize("machine", COSTS)
def test_close_to_the_best_fixed_number_and_never_much_slower_than_none(
    machine, pattern, kind, sampled
):
    auto, fixed = 0.0, [0.0] * (LONGEST + 1)
    for seed in range(2):
        right = {kind: patterns(TOKENS, seed)[pattern]}
        simulation = Simulation(COSTS[machine], **right, sampled=sampled)
        auto += simulation.auto()[0]
        fixed = [sum_ + simulation.fixed(g, kind) for g, sum_ in enumerate(fixed)]
    assert auto <= 1.05 * min(fixed)
    assert auto <= 1.05 * fixed[0]


@pytest.mark.parametrize("good", ["draft", "copy"])
@pytest.mark.parametrize("machine", ["a GPU", "a CPU"])
def test_of_two_kinds_the_better_one_is_found(machine, good):
    bad = "copy" if good == "draft" else "draft"
    right = {good: patterns(TOKENS)["nine of ten"], bad: patterns(TOKENS, 1)["one of ten"]}
    simulation = Simulation(COSTS[machine], **right)
    cost, pace, chosen = simulation.auto()
    # Trials of a draft that is not worth it take 3 % of the time, and the beginning some more.
    assert cost <= 1.1 * min(simulation.fixed(g, good) for g in range(LONGEST + 1))
    assert [offer.kind for offer in chosen[20:]].count(good) > 0.9 * len(chosen[20:])


def test_where_both_are_as_good_copies_are_taken_as_they_cost_less():
    right = patterns(TOKENS)["nine of ten"]
    _, _, chosen = Simulation(COSTS["a CPU"], draft=right, copy=right).auto()
    assert [offer.kind for offer in chosen].count("copy") > 0.8 * len(chosen)


def test_a_change_is_noticed():
    right = patterns(1200)["alternating"]
    _, _, chosen = Simulation(COSTS["a CPU"], draft=right).auto()
    lengths = [offer.length for offer in chosen]
    changes = [a > 2 and b > 2 for a, b in zip(lengths, lengths[1:], strict=False)]
    off = [i for i, n in enumerate(lengths) if n == 0]
    assert True in changes[: off[0]], "the good beginning"
    assert len(off) > 300, "two bad stretches of 300 tokens"
    assert True in changes[off[100] :], "the good stretch between them"


def test_copies_that_become_right_are_noticed_without_being_proposed():
    right = np.arange(400) >= 200
    _, pace, chosen = Simulation(COSTS["a CPU that pays for every position"], copy=right).auto()
    assert {offer.length for offer in chosen} == {0}
    assert pace.estimates["copy"].judged > 40
    _, pace, chosen = Simulation(COSTS["a CPU"], copy=right).auto()
    assert {offer.length for offer in chosen[20:190]} == {0}
    assert min(offer.length for offer in chosen[-20:-1]) > 0


def test_trials_are_rare_and_stop_where_nothing_could_win():
    never = patterns(TOKENS)["never right"]
    _, pace, chosen = Simulation(COSTS["a CPU"], draft=never).auto()
    late = [offer.length for offer in chosen[100:]]
    assert set(late) == {0, 1}
    assert 0 < sum(late) < 0.1 * len(late)
    assert pace.off.startswith("too few proposals are kept: alpha 0.")
    assert pace.off.endswith("; c 0.10, v(2)/v(1) 1.20")
    _, pace, chosen = Simulation(COSTS["a CPU that pays for every position"], draft=never).auto()
    assert {offer.length for offer in chosen} == {0}
    assert pace.off == "proposals cost more than they can save: c 0.10, v(2)/v(1) 2.00"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_trial_that_is_kept_pays_for_the_next(sampled):
    pacer, pace = Pacer(COSTS["a CPU"]), Pace(sampled=sampled)
    learn(pacer, pace, 5, 0, times=30)
    lengths = []
    for _ in range(200):
        n = asked(pacer, pace)
        learn(pacer, pace, n, n)
        lengths.append(n)
    first = next(i for i, n in enumerate(lengths) if n)
    assert first > 2
    assert lengths[first : first + 4] == [1] * 4
    assert lengths[-1] > 3
    assert pace.off is None


def test_trials_in_the_place_of_copies_take_no_more_than_their_share_of_time():
    table = COSTS["a CPU"].of(1).table
    pacer, pace = Pacer(COSTS["a CPU"]), Pace()
    learn(pacer, pace, 5, 0, times=40)
    copy, tokens, seconds, tried = Offer("copy", 15, (2,) * 15), 0, 0.0, 0
    for _ in range(300):
        (offer,) = pacer.choose([pace], [[copy, DRAFT]])
        by_draft = offer.kind == "draft"
        kept = 0 if by_draft else offer.length
        pacer.observe([pace], [[copy, DRAFT]], [offer], [outcome(kept)])
        pacer.learn([pace])
        seconds += table[1, 1] if by_draft else table[0, offer.length]
        tokens, tried = tokens + kept + 1, tried + by_draft
    assert tried > 5
    assert seconds < 1.035 * tokens * table[0, 15] / 16


def test_greedy_rows_learn_from_those_before_and_sampled_rows_do_not():
    history = History()
    learn(Pacer(COSTS["a CPU"], history=history), Pace(), 5, 0, times=100)
    pacer = Pacer(COSTS["a CPU"], history=history)
    assert asked(pacer, Pace()) == 0
    unlearned = asked(Pacer(COSTS["a CPU"]), Pace(sampled=True))
    assert asked(pacer, Pace(sampled=True)) == unlearned > 0


def test_each_task_has_its_own_past():
    history = History()
    pacer = Pacer(COSTS["a CPU"], history=history)
    learn(pacer, Pace((1, 2)), 5, 0, times=100)
    assert asked(pacer, Pace((1, 2))) == 0
    assert asked(pacer, Pace((1, 3))) > 0
    for task in range(TASKS):
        history.of((task,))
    assert len(history._tasks) == TASKS
    assert history.of((1, 2)) == Past(), "the oldest is forgotten"
    history.of((1,)).pause = 7
    history.of((99, 99))
    assert history.of((1,)).pause == 7, "the one that was used last is not the oldest"


def test_sampled_rows_neither_teach_nor_heed_their_neighbours():
    alone, beside = Pacer(COSTS["a CPU"], width=3), Pacer(COSTS["a CPU"], width=3)
    one, other = Pace(sampled=True), Pace(sampled=True)
    neighbours = [Pace(sampled=True), Pace(sampled=True)]
    for step in range(60):
        kept = 2 if step % 3 else 0
        n = asked(alone, one)
        count = 2 if step < 30 else 1  # a neighbour leaves
        rows = [other, *neighbours[:count]]
        offers = [[DRAFT]] * len(rows)
        chosen = beside.choose(rows, offers)
        assert chosen[0].length == n
        learn(alone, one, n, min(n, kept))
        results = [outcome(min(n, kept)), *[outcome(0)] * count]
        beside.observe(rows, offers, chosen, results)
        beside.learn(rows)
    assert beside.history.of(()) == Past()


def test_sampled_rows_of_a_batch_take_the_same_length_or_none():
    """They do not know of each other, and all wait for the longest proposal."""
    pacer, lengths = Pacer(COSTS["a GPU"], width=4), {}
    for kept in (0, 2, 4, 9):
        pace = Pace(sampled=True)
        learn(pacer, pace, 9, kept, times=30)
        lengths[kept] = asked(pacer, pace)
    assert lengths[0] in (0, 1), "none, or a trial"
    assert lengths[2] == lengths[4] == lengths[9] == asked(pacer, Pace(sampled=True)) > 2


def test_one_row_of_a_sampled_batch_does_not_give_up_drafting_at_once():
    """The others go on, and it would wait for them all the same."""

    def goes_on(width, refusals):
        pacer, pace = Pacer(COSTS["a CPU"], width=width), Pace(sampled=True)
        learn(pacer, pace, 5, 0, times=refusals)
        return asked(pacer, pace) > 1

    assert goes_on(1, 1) and not goes_on(1, 6)
    assert goes_on(4, 6) and not goes_on(4, 30)


def test_one_row_of_a_sampled_batch_copies_only_where_much_speaks_for_it():
    copy = Offer("copy", 9, tuple(range(9)))

    def copied(kept, width):
        pacer, pace = Pacer(COSTS["a CPU"], width=width), Pace(sampled=True)
        for _ in range(20):
            pacer.observe([pace], [[copy]], [copy], [outcome(kept)])
            pacer.learn([pace])
        return pacer.choose([pace], [[copy]])[0].length

    assert copied(1, width=1) > 0
    assert copied(1, width=4) == 0
    assert copied(9, width=4) > 0


def test_the_width_of_a_batch_counts():
    one = StepCosts(1, 0.05, tuple(1 + 0.01 * n for n in range(LONGEST + 1)))
    many = StepCosts(16, 0.05, tuple(1.0 + 0.3 * n for n in range(LONGEST + 1)))
    steep = Costs((one, many))
    single = asked(Pacer(steep, width=1), Pace(sampled=True))
    full = asked(Pacer(steep, width=16), Pace(sampled=True))
    assert single > full > 0
    chosen = Pacer(steep).choose([Pace() for _ in range(16)], [[DRAFT]] * 16)
    assert {offer.length for offer in chosen} == {full}


def test_kinds_are_learned_about_apart():
    pacer, pace = Pacer(costs(1.0, staircase)), Pace()
    copy = Offer("copy", 15, (2,) * 15)
    for offer, kept in [(copy.cut(4), 4), (DRAFT.cut(4), 0)] * 10:
        pacer.observe([pace], [[offer]], [offer], [outcome(kept)])
        pacer.learn([pace])
    assert pace.estimates["copy"].alpha(0, 0) == 1
    assert pace.estimates["draft"].alpha(0, 0) == 0
    assert asked(pacer, pace, [copy]) > 4
    assert asked(pacer, pace, [DRAFT]) == 0


def test_what_was_proposed_is_judged_once_and_what_was_not_as_far_as_it_is_known():
    pacer, pace = Pacer(COSTS["a CPU"]), Pace()
    copy = Offer("copy", 4, (2, 2, 9, 9))
    pacer.observe([pace], [[copy]], [copy.cut(3)], [([2, 2, 7], 2, False)])
    pacer.learn([pace])
    assert (pace.estimates["copy"].judged, pace.estimates["copy"].kept) == (3, 2)
    pace = Pace()
    pacer.observe([pace], [[copy, DRAFT]], [DRAFT.cut(1)], [([2, 2], 1, False)])
    pacer.learn([pace])
    assert (pace.estimates["copy"].judged, pace.estimates["copy"].kept) == (2, 2)
    assert (pace.estimates["draft"].judged, pace.estimates["draft"].kept) == (1, 1)


def test_only_a_trial_earns():
    pacer, pace = Pacer(COSTS["a CPU"]), Pace(sampled=True)
    learn(pacer, pace, 5, 0, times=30)
    while not asked(pacer, pace):
        pass
    assert pace.purse.worth > 0
    learn(pacer, pace, 9, 9, times=30)
    assert asked(pacer, pace) > 1
    before = pace.purse.savings
    learn(pacer, pace, 9, 9)
    assert pace.purse.savings == before


def test_what_a_row_is_not_offered_it_does_not_get():
    pacer = Pacer(COSTS["a GPU"])
    short, none = Offer("copy", 2, (7, 8)), []
    chosen = pacer.choose([Pace(), Pace(), Pace()], [[short], none, [DRAFT.cut(1)]])
    assert chosen[:2] == [short, NOTHING]
    assert chosen[2].length <= 1


@pytest.mark.parametrize("sampled", [False, True])
def test_a_number_of_drafts_is_kept_for_some_steps_unless_there_is_something_to_copy(sampled):
    pacer, pace = Pacer(COSTS["a CPU"]), Pace(sampled=sampled)
    first = asked(pacer, pace)
    assert first > 0
    learn(pacer, pace, first, 0, times=100)
    assert [asked(pacer, pace) for _ in range(HOLD)] == [first] * HOLD
    assert asked(pacer, pace) == 0, "thought over"
    pacer, pace = Pacer(COSTS["a GPU"]), Pace(sampled=sampled)
    assert asked(pacer, pace) > 0
    copy = Offer("copy", 9, tuple(range(9)))
    assert pacer.choose([pace], [[copy, DRAFT]]) == [copy]


def test_without_costs_a_usual_number_is_taken_of_what_is_offered_first():
    chosen = Pacer().choose([Pace(), Pace()], [[Offer("copy", 2, (7, 8)), DRAFT], [DRAFT]])
    assert chosen == [Offer("copy", 2, (7, 8)), Offer("draft", UNKNOWN_COSTS)]
    assert Pacer().choose([Pace()], [[]]) == [NOTHING]
