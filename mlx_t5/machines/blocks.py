"""One index of blocks of prompts, which several ranks take and bring back.

Whoever has nothing to do takes the next block, so fast ranks do more of them. A rank that is lost
gives its blocks back, and the next one who asks gets them. Outcomes leave in the order of the
prompts. How far the ranks may run ahead of the oldest unfinished block is bounded, and so is
memory.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

AHEAD = 64  # blocks from the oldest unfinished one on that may be in hand, for each rank
HELD = 3  # blocks that a rank has at a time, so that its batch does not run empty between two

Work = Callable[[Iterator[Any], Iterator[int], Callable[[], bool]], Iterator[Any]]


@dataclass
class Block:
    """Prompts that follow each other.

    Attributes:
        number: of the block.
        first: index of its first prompt in the input.
        items: the prompts, or whatever lines hold.
        outcomes: what has become of them; none as long as they are not all done.
    """

    number: int
    first: int
    items: list[Any]
    outcomes: list[Any] = field(default_factory=list)


class Blocks:
    """The index. Any thread may call it.

    Attributes:
        prompts: how many each taker has brought back.
    """

    def __init__(
        self,
        items: Iterator[Any],
        size: int,
        texts: int = 1,
        first: int = 0,
        ready: Callable[[], bool] = lambda: True,
        ahead: int = AHEAD,
    ) -> None:
        """Cuts items into blocks as they are asked for.

        Args:
            items: what is to be done.
            size: items of a block at most.
            texts: outcomes an item.
            first: index of the first item.
            ready: whether the next item can be drawn without waiting for it.
            ahead: blocks in hand at most.
        """
        self._items, self._size, self._texts, self._ready = items, size, texts, ready
        self._ahead, self._index = ahead, first
        self._changed = threading.Condition()
        self._blocks: dict[int, Block] = {}  # those that have not left, by number
        self._takers: dict[int, str] = {}  # who has those that are not done
        self._lost: list[int] = []  # a heap of those that were given back
        self._oldest = self._drawn = 0
        self._ended = False
        self._error: Exception | None = None
        self.prompts: Counter[str] = Counter()

    def take(self, taker: str) -> Block | None:
        """The next block to do, or None if there is none at the moment."""
        with self._changed:
            if self._lost:
                block = self._blocks[heapq.heappop(self._lost)]
            elif drawn := self._draw():
                block = Block(self._drawn, self._index, drawn)
                self._blocks[block.number] = block
                self._drawn, self._index = self._drawn + 1, self._index + len(drawn)
            else:
                return None
            self._takers[block.number] = taker
            return block

    def _draw(self) -> list[Any]:
        """Items of a new block; none if there are none, or too much is in hand."""
        items: list[Any] = []
        if self._ended or self._drawn - self._oldest >= self._ahead:
            return items
        try:
            while len(items) < self._size and self._ready():
                items.append(next(self._items))
        except StopIteration:
            self._ended = True
        except Exception as error:  # the input cannot be read on: who waits is told
            self._ended, self._error = True, error
        return items

    def deliver(self, taker: str, number: int, outcomes: Sequence[Any]) -> None:
        """Brings a block back; one that another has got in the meantime is not needed.

        Raises:
            ValueError: there are not as many outcomes as it has to have.
        """
        with self._changed:
            if self._takers.get(number) != taker:
                return
            block = self._blocks[number]
            if len(outcomes) != len(block.items) * self._texts:
                raise ValueError(f"{len(outcomes)} outcomes of {len(block.items)} prompts")
            block.outcomes = list(outcomes)
            del self._takers[number]
            self.prompts[taker] += len(block.items)
            self._changed.notify_all()

    def lose(self, taker: str) -> None:
        """Gives all blocks of a taker to whoever asks next."""
        with self._changed:
            for number in [n for n, whose in self._takers.items() if whose == taker]:
                del self._takers[number]
                heapq.heappush(self._lost, number)
            self._changed.notify_all()

    def held(self, taker: str) -> int:
        """How many blocks a taker has."""
        with self._changed:
            return sum(whose == taker for whose in self._takers.values())

    @property
    def finished(self) -> bool:
        """Whether all is done and has left."""
        with self._changed:
            return self._ended and not self._blocks and not self._error

    def wait(self, seconds: float) -> None:
        """Waits until something has changed, but no longer than this."""
        with self._changed:
            self._changed.wait(seconds)

    def in_order(self) -> Iterator[Block]:
        """Yields what is done and whose predecessors are done.

        Raises:
            Exception: what kept the input from being read.
        """
        while True:
            with self._changed:
                block = self._blocks.get(self._oldest)
                if block is None and self._error:
                    raise self._error
                if block is None or not block.outcomes:
                    return
                del self._blocks[self._oldest]
                self._oldest += 1
            yield block


class Share:
    """The blocks of one rank as one stream of prompts, so that its batches are always full."""

    def __init__(
        self,
        take: Callable[[bool], Block | None],
        texts: int = 1,
        first: Block | None = None,
    ) -> None:
        """Asks for blocks as prompts are needed.

        Args:
            take: the next block; told whether to wait for it. None if there is none.
            texts: outcomes an item.
            first: a block that has been taken.
        """
        self._take, self._texts, self._next = take, texts, first
        self._left = 0  # prompts of the last block that have not been drawn
        self._open: deque[Block] = deque()  # blocks that are not done
        self._drawn: deque[int] = deque()  # indexes of prompts

    def outcomes(self, work: Work) -> Iterator[tuple[Block, list[Any]]]:
        """Does the work; yields each block with its outcomes."""
        made: list[Any] = []
        for outcome in work(self._prompts(), self._indexes(), self.ready):
            made.append(outcome)
            if len(made) == len(self._open[0].items) * self._texts:
                yield self._open.popleft(), made
                made = []

    def ready(self) -> bool:
        """Whether the next prompt can be drawn without waiting for it."""
        if not self._left and not self._next and len(self._open) < HELD:
            self._next = self._take(False)
        return self._left > 0 or self._next is not None

    def _prompts(self) -> Iterator[Any]:
        while block := self._next or self._take(True):
            self._next, self._left = None, len(block.items)
            self._open.append(block)
            for i, item in enumerate(block.items):
                self._left -= 1
                self._drawn.append(block.first + i)
                yield item

    def _indexes(self) -> Iterator[int]:
        while True:  # `results` draws a prompt first, and then its index
            yield self._drawn.popleft()


def lead(blocks: Blocks, work: Work, texts: int, name: str) -> Iterator[Block]:
    """Does what the others do not, and yields all blocks in order as they are done.

    Args:
        blocks: the index.
        work: makes an iterator of outcomes of one of prompts.
        texts: outcomes a prompt.
        name: of this taker.

    Raises:
        Exception: what kept the input from being read, or what `work` raises.
    """
    while not blocks.finished:
        if first := blocks.take(name):
            share = Share(lambda wait: blocks.take(name), texts, first)
            for block, outcomes in share.outcomes(work):
                blocks.deliver(name, block.number, outcomes)
                yield from blocks.in_order()
        else:
            blocks.wait(0.5)
        yield from blocks.in_order()
