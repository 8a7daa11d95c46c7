"""The index of blocks: who has which, what is given back, and the order in which they leave."""

import pytest

from mlx_t5.machines.blocks import HELD, Block, Blocks, Share, lead


def numbers(blocks: Blocks) -> list[int]:
    return [block.number for block in blocks.in_order()]


def test_blocks_leave_in_the_order_of_the_input():
    blocks = Blocks(iter("abcde"), 2, first=10)
    a, b, c = (blocks.take(taker) for taker in "121")
    assert [(x.number, x.first, x.items) for x in (a, b, c)] == [
        (0, 10, ["a", "b"]),
        (1, 12, ["c", "d"]),
        (2, 14, ["e"]),
    ]
    assert blocks.take("1") is None
    blocks.deliver("1", 2, ["E"])
    blocks.deliver("2", 1, ["C", "D"])
    assert numbers(blocks) == [] and not blocks.finished
    blocks.deliver("1", 0, ["A", "B"])
    assert [block.outcomes for block in blocks.in_order()] == [["A", "B"], ["C", "D"], ["E"]]
    assert blocks.finished and blocks.prompts == {"1": 3, "2": 2}


def test_lost_blocks_are_given_to_who_asks_next_and_count_once():
    blocks = Blocks(iter("abcd"), 1)
    for _ in range(2):
        blocks.take("slow")
    blocks.take("fast")
    blocks.lose("slow")
    assert blocks.held("slow") == 0
    assert [blocks.take("fast").number for _ in range(3)] == [0, 1, 3]
    blocks.deliver("slow", 0, ["late"])  # it was not lost after all
    blocks.deliver("fast", 0, ["A"])
    blocks.deliver("fast", 0, ["again"])
    assert [block.outcomes for block in blocks.in_order()] == [["A"]]
    assert blocks.prompts == {"fast": 1}


def test_nobody_runs_ahead_without_bound():
    blocks = Blocks(iter(range(100)), 1, ahead=3)
    assert [blocks.take("x").number for _ in range(3)] == [0, 1, 2]
    assert blocks.take("x") is None
    blocks.deliver("x", 1, ["B"])
    assert blocks.take("x") is None, "the oldest is not done"
    blocks.deliver("x", 0, ["A"])
    assert numbers(blocks) == [0, 1]
    assert blocks.take("x").number == 3


def test_outcomes_have_to_be_as_many_as_the_prompts():
    blocks = Blocks(iter("ab"), 2, texts=2)
    blocks.take("x")
    with pytest.raises(ValueError):
        blocks.deliver("x", 0, ["A"] * 2)
    blocks.deliver("x", 0, ["A"] * 4)
    assert numbers(blocks) == [0]


def test_a_pipe_is_not_waited_for():
    lines, at_hand = iter("abc"), [2]

    def ready() -> bool:
        at_hand[0] -= 1
        return at_hand[0] >= 0

    blocks = Blocks(lines, 8, ready=ready)
    assert blocks.take("x").items == ["a", "b"]
    assert blocks.take("x") is None and not blocks.finished


def test_an_input_that_cannot_be_read_is_told_after_what_could_be():
    def broken():
        yield "a"
        raise OSError("gone")

    blocks = Blocks(broken(), 1)
    assert blocks.take("x").items == ["a"]
    assert blocks.take("x") is None
    blocks.deliver("x", 0, ["A"])
    with pytest.raises(OSError, match="gone"):
        list(lead(blocks, lambda *_: iter(()), 1, "0"))


def test_a_rank_has_one_stream_of_prompts_with_their_indexes():
    blocks = Blocks(iter("abcdefgh"), 2, texts=2)
    seen = []

    def work(prompts, indexes, ready):
        for prompt, index in zip(prompts, indexes, strict=False):
            seen.append((prompt, index, ready()))
            yield prompt.upper()
            yield index

    done = [block.outcomes for block in lead(blocks, work, 2, "0")]
    assert done[1] == ["C", 2, "D", 3] and len(done) == 4
    assert [(p, i) for p, i, _ in seen] == list(zip("abcdefgh", range(8), strict=True))
    assert [ready for *_, ready in seen] == [True] * 7 + [False]


def test_a_rank_does_not_hoard():
    taken = []

    def take(wait: bool) -> Block:
        taken.append(Block(len(taken), 0, ["x"]))
        return taken[-1]

    share = Share(take)
    prompts = share._prompts()
    while share.ready():
        next(prompts)
    assert len(taken) == HELD


def test_who_leads_does_what_others_have_lost():
    blocks = Blocks(iter("abc"), 1)
    blocks.take("1")
    blocks.lose("1")
    done = lead(blocks, lambda prompts, *_: (p.upper() for p in prompts), 1, "0")
    assert [block.outcomes for block in done] == [["A"], ["B"], ["C"]]
