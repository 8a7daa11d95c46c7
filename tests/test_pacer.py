"""What the pacer chooses and what that costs, on tables of costs and patterns of acceptance."""

import pytest

from draft_length import LONGEST, Costs, Curve
from pacer import UNKNOWN_COSTS, Pace, Pacer
from simulated_decoding import COSTS, STAIRCASE, Simulation, patterns

TOKENS = 600


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("pattern", patterns(1))
@pytest.mark.parametrize("machine", COSTS)
def test_close_to_the_best_fixed_number_and_never_much_slower_than_none(machine, pattern, sampled):
    auto, fixed = 0.0, [0.0] * (LONGEST + 1)
    for seed in range(2):
        right = patterns(TOKENS, seed)[pattern]
        simulation = Simulation(COSTS[machine], sampled)
        auto += simulation.auto(right)[0]
        fixed = [sum_ + simulation.fixed(right, g) for g, sum_ in enumerate(fixed)]
    assert auto <= 1.05 * min(fixed)
    assert auto <= 1.05 * fixed[0]


def test_a_change_is_noticed():
    right = patterns(1200)["alternating"]
    _, _, lengths = Simulation(COSTS["a CPU"]).auto(right)
    changes = [a > 2 and b > 2 for a, b in zip(lengths, lengths[1:], strict=False)]
    off = [i for i, n in enumerate(lengths) if n == 0]
    assert True in changes[: off[0]], "the good beginning"
    assert len(off) > 400, "two bad stretches of 300 tokens"
    assert True in changes[off[100] :], "the good stretch between them"


def test_probes_are_rare_and_stop_where_nothing_could_win():
    never = patterns(TOKENS)["never right"]
    _, pace, lengths = Simulation(COSTS["a CPU"]).auto(never)
    late = lengths[100:]
    assert 0 < sum(late) < 0.1 * len(late)
    assert pace.off.startswith("too few proposals are kept: alpha 0.")
    assert pace.off.endswith(" would pay")
    _, pace, lengths = Simulation(COSTS["a CPU that pays for every position"]).auto(never)
    assert set(lengths) == {0}
    assert pace.off == "proposals cost more than they can save: c 0.10, v(2)/v(1) 2.00"


def test_a_probe_that_is_kept_pays_for_the_next():
    pacer, pace = Pacer(COSTS["a CPU"]), Pace()
    for _ in range(30):
        pacer.lengths([pace], ["draft"], [99], [False])
        pacer.observe([pace], [5], ["draft"], [(5, 0)])
    lengths = []
    for _ in range(200):
        lengths += pacer.lengths([pace], ["draft"], [99], [False])
        n = lengths[-1]
        pacer.observe([pace], [n], ["draft"], [(n, n)])
    first = next(i for i, n in enumerate(lengths) if n)
    assert 1 in lengths[first + 1 : first + 3]
    assert lengths[-1] > 3
    assert pace.off is None


def test_greedy_rows_learn_from_those_before_and_sampled_rows_do_not():
    history = {}
    for _ in range(3):
        simulation = Simulation(COSTS["a CPU"])
        simulation.pacer.history = history
        simulation.auto(patterns(100)["never right"])
    pacer = Pacer(COSTS["a CPU"], history=history)
    assert pacer.lengths([Pace()], ["draft"], [99], [False]) == [0]
    unlearned = Pacer(COSTS["a CPU"]).lengths([Pace()], ["draft"], [99], [True])
    assert pacer.lengths([Pace()], ["draft"], [99], [True]) == unlearned != [0]


def test_sampled_rows_neither_teach_nor_heed_their_neighbours():
    costs = COSTS["a CPU"]
    alone, beside = Pacer(costs, width=3), Pacer(costs, width=3)
    one, other, neighbours = Pace(), Pace(), [Pace(), Pace()]
    for step in range(60):
        kept = 2 if step % 3 else 0
        (n,) = alone.lengths([one], ["draft"], [99], [True])
        count = 2 if step < 30 else 1  # a neighbour leaves
        rows = [other, *neighbours[:count]]
        lengths = beside.lengths(rows, ["draft"] * len(rows), [99] * len(rows), [True] * len(rows))
        assert lengths[0] == n
        alone.observe([one], [n], ["draft"], [(n, min(n, kept))])
        rest = [(m, 0) for m in lengths[1:]]
        beside.observe(rows, lengths, ["draft"] * len(rows), [(n, min(n, kept)), *rest])
    assert beside.history == {}


def test_the_width_of_a_batch_counts():
    steep = Costs(Curve(((1, 1.0), (16, 1.1), (64, 20.0))), Curve(((1, 0.05),)))
    single = Pacer(steep, width=1).lengths([Pace()], ["draft"], [99], [True])
    full = Pacer(steep, width=16).lengths([Pace()], ["draft"], [99], [True])
    assert single[0] > full[0]
    many = Pacer(steep).lengths([Pace()] * 16, ["draft"] * 16, [99] * 16, [False] * 16)
    assert many == full * 16


def test_kinds_are_learned_about_apart():
    pacer, pace = Pacer(Costs(STAIRCASE, STAIRCASE)), Pace()
    for kind, kept in [("copy", 4), ("draft", 0)] * 10:
        pacer.lengths([pace], [kind], [99], [False])
        pacer.observe([pace], [4], ["copy" if kind == "copy" else "draft"], [(4, kept)])
    assert pace.estimates["copy"].alpha(0, 0) == 1
    assert pace.estimates["draft"].alpha(0, 0) == 0
    assert pacer.lengths([pace], ["copy"], [99], [False])[0] > 4
    assert pacer.lengths([pace], ["draft"], [99], [False]) == [0]


def test_the_draft_falls_behind_while_it_rests():
    pacer, pace = Pacer(Costs(STAIRCASE, STAIRCASE)), Pace()
    seen = []
    for length, writer, judged in [(2, "copy", (2, 2)), (0, "", (0, 0)), (1, "draft", (1, 1))]:
        pacer.observe([pace], [length], [writer], [judged])
        seen.append(pace.behind)
    assert seen == [4, 5, 1]


def test_without_costs_a_usual_number_is_taken():
    assert Pacer().lengths([Pace()], ["draft"], [99], [False]) == [UNKNOWN_COSTS]
