"""Tests prompts that rank 0 reads and passes to all ranks."""

import pytest

from meeting import meet
from mlx_t5.errors import UserError
from mlx_t5.machines.shared_prompts import AT_ONCE, SharedPrompts


class Source:
    """Prompts of rank 0, of which `at_hand` can be read without waiting."""

    def __init__(self, items, at_hand=10**6):
        self._items, self.at_hand, self.count = iter(items), at_hand, None

    def ready(self):
        return self.at_hand > 0

    def __next__(self):
        self.at_hand -= 1
        return next(self._items)


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, 3 * AT_ONCE + 1])
def test_all_ranks_get_the_prompts_that_rank_0_reads(count):
    items = [f"é {i}" if i % 2 else ("a", f"b {i}") for i in range(count)]
    shared = lambda ranks: SharedPrompts(None if ranks.rank else Source(items), ranks)  # noqa: E731
    assert meet(3, lambda ranks: list(shared(ranks))) == [items] * 3


def test_errors_reach_all_ranks_in_order():
    def broken():
        yield UserError("line 1 is empty")
        raise UserError("cannot read it")

    def work(ranks):
        prompts = SharedPrompts(None if ranks.rank else Source(broken()), ranks)
        return str(next(prompts)), pytest.raises(UserError, next, prompts).value.args

    assert meet(2, work) == [("line 1 is empty", ("cannot read it",))] * 2


def test_all_ranks_know_how_many_prompts_are_ready():
    source = Source(["one", "two", "three"], at_hand=2)

    def work(ranks):
        prompts = SharedPrompts(None if ranks.rank else source, ranks)
        drawn = []
        while prompts.ready():
            drawn.append(next(prompts))
        ranks.gathered(None)
        source.at_hand = 1
        ranks.gathered(None)
        return drawn, prompts.ready(), next(prompts)

    assert meet(2, work) == [(["one", "two"], True, "three")] * 2
