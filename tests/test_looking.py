"""How often places to copy from are looked for, and what is made of those that are found."""

import pytest

from draft_length import LONGEST
from drafters import NOTHING, Offer
from pace import Pace
from pacer import LONGEST_REST, Pacer
from simulated_decoding import COSTS

DRAFT = Offer("draft", 99)
BAD, GOOD = Offer("weak copy", 3, (7, 8, 9)), Offer("copy", 9, tuple(range(2, 11)))


def rests(pacer, pace, offer=BAD):
    """Steps from a look that finds this offer to the next look, which is about to be made."""
    pacer.choose([pace], [[offer]])
    steps = 0
    while pacer.resting([pace]):
        pacer.choose([pace], [[]])  # what was not offered says nothing
        steps += 1
    return steps


@pytest.mark.parametrize("sampled", [False, True])
def test_the_more_often_looking_for_copies_was_in_vain_the_less_often_it_is_done(sampled):
    pacer, pace = Pacer(COSTS["a CPU that pays for every position"]), Pace(sampled=sampled)
    longer = [rests(pacer, pace) for _ in range(8)]
    # A greedy row falls into step with others, so that some of its rests are shorter.
    rising = [0, 1, 3, 7] if sampled else [0, 0, 1, 3, 7]
    assert longer == [*rising, *[LONGEST_REST] * (8 - len(rising))]
    pacer.costs = COSTS["a GPU"]
    assert pacer.choose([pace], [[GOOD]]) == [GOOD]
    assert pacer.resting([pace]) == []
    pacer.costs = COSTS["a CPU that pays for every position"]
    assert rests(pacer, pace) == 0, "the first time is nothing to go by"
    # Nothing to copy is as bad as a bad copy.
    assert pacer.choose([pace], [[]]) == [NOTHING]
    assert pacer.resting([pace]) == [0]


def test_where_drafts_go_first_copies_are_looked_for_less_often_too():
    pacer, pace = Pacer(COSTS["a GPU"]), Pace()
    for _ in range(2):
        assert pacer.resting([pace]) == []
        assert pacer.choose([pace], [[BAD, DRAFT]])[0].kind == "draft"
    pacer.steps += 1  # not the step in which others look
    assert pacer.choose([pace], [[BAD, DRAFT]])[0].kind == "draft"
    assert pacer.resting([pace]) == [0]
    assert pacer.choose([pace], [[DRAFT]])[0].kind == "draft"
    assert pacer.resting([pace]) == []
    assert pacer.choose([pace], [[GOOD]]) == [GOOD]
    assert pacer.resting([pace]) == []


def test_a_greedy_row_rests_as_the_last_one_of_its_task_did():
    pacer = Pacer(COSTS["a CPU that pays for every position"], width=3)
    first, second, other = Pace((1,)), Pace((1,)), Pace((2,))
    assert [rests(pacer, first) for _ in range(5)] == [0, 0, 1, 3, 7]
    assert pacer.resting([second]) == [], "a text has begun"
    pacer.steps = 32
    assert [rests(pacer, pace) for pace in (second, other)] == [LONGEST_REST, 0]
    alone = Pace((2,), sampled=True)
    assert [rests(pacer, alone) for _ in range(4)] == [0, 1, 3, 7]
    pacer.steps = 64
    assert rests(pacer, Pace((2,))) == 1, "a sampled row teaches nobody"


def test_greedy_rows_look_for_copies_in_the_same_steps():
    pacer, paces, looks = Pacer(COSTS["a CPU that pays for every position"], width=3), [], []
    for step in range(64):
        if step in (0, 3, 10):
            paces.append(Pace((step,)))
        resting = pacer.resting(paces)
        pacer.choose(paces, [[] if i in resting else [BAD] for i in range(len(paces))])
        looks.append(len(paces) - len(resting))
    assert looks[-LONGEST_REST - 1 :].count(3) == 1
    assert looks[-LONGEST_REST - 1 :].count(0) == LONGEST_REST


def test_a_text_may_begin_with_a_copy_though_nothing_speaks_for_it_yet():
    def chosen(kind, *others):
        offer = Offer(kind, LONGEST, tuple(range(LONGEST)))
        (it,) = Pacer(COSTS["a CPU"]).choose([Pace(sampled=True)], [[offer, *others]])
        return it.kind, it.length > 0

    assert chosen("first copy") == ("first copy", True)
    assert not chosen("weak copy")[1]
    assert chosen("weak copy", DRAFT) == ("draft", True)
