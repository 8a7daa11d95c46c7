"""What the processes that compute together tell each other: sums, columns, and what rank 0 has.

Each of them is a rank of a group of `mx.distributed`. A sum is the terms of all ranks, gathered
and added in the order of the ranks. So every rank has the same bits, on any backend, and a row's
bits do not depend on where it stands in the array, as they would in a reduction that gives each
rank a segment to add. Of few ranks that moves as many bytes as such a reduction, or little more,
and with a ring in half as many hops: n - 1 and not 2 (n - 1).

Every rank runs the same loop, and so makes the same collectives in the same order. What could
differ from rank to rank (a token that was drawn, a time, free memory) is therefore asked of rank 0,
or of all, before anything depends on it.

On Metal all of it is the CPU's work, up to what the host reads or the next product takes: macOS
ends the work of a GPU that waits about five seconds, and a rank may load its model for minutes.

Symbols: n ranks, M rows, V columns of all ranks together.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import ON_CUDA, mx
from mlx_t5.errors import RanksApart

if TYPE_CHECKING:
    from mlx_t5.network.exact import ExactTarget
    from model import T5


class Ranks:
    """The ranks of a group; without a group there is one, which needs nobody.

    Attributes:
        group: as `load` takes it; None for a process alone.
        rank: this process's number, from 0.
        size: n.
        collectives: how many there have been, of this process.
    """

    def __init__(self, group: Any = None) -> None:
        """Takes a group of `mx.distributed`, as its `init` returns it."""
        self.group = group
        self.rank: int = group.rank() if group else 0
        self.size: int = group.size() if group else 1
        self.collectives = 0

    def sum(self, term: mx.array) -> mx.array:
        """The sum of every rank's array, in the order of the ranks; all have one shape and type."""
        return term if self.size == 1 else self._gather(term, partial(reduce, add))

    def columns(self, shard: mx.array, count: int) -> mx.array:
        """(M, V) from each rank's (M, its columns), of which `share` says which they are.

        Args:
            shard: of this rank.
            count: V.
        """
        if self.size == 1:
            return shard
        width = self.share(count, 0).stop
        padded = mx.pad(shard, ((0, 0), (0, width - shard.shape[1])))
        return self._gather(padded, lambda shards: mx.concatenate(shards, axis=1)[:, :count])

    def of_first(self, array: mx.array) -> mx.array:
        """What rank 0 has in this place; shapes and types are the same everywhere."""
        return array if self.size == 1 else self._gather(array, itemgetter(0))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gathered(flag))

    def gathered(self, value: Any) -> list[Any]:
        """What every rank gives in this place, in their order: values that JSON can hold."""
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        with self.in_step():
            longest = max(size.item() for size in self._gather(mx.array(len(data)), list))
            parts = self._gather(mx.array(np.frombuffer(data.ljust(longest), np.uint8)), list)
            return [json.loads(np.array(part).tobytes()) for part in parts]

    def shared(self, value: Any) -> Any:
        """What rank 0 gives in this place, see `gathered`; what others give does not count."""
        return value if self.size == 1 else self.gathered(None if self.rank else value)[0]

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What the ranks compute together: an error in here on one of them cannot be got over.

        Raises:
            RanksApart: in place of a RuntimeError or MemoryError, of several ranks.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self.size == 1:
                raise
            raise RanksApart(error) from error

    def share(self, count: int, rank: int | None = None) -> slice:
        """Which of so many rows a rank has: equal shares, the last of them maybe less.

        Args:
            count: of all.
            rank: whose; None is this one.
        """
        rank, size = self.rank if rank is None else rank, -(-count // self.size)
        return slice(min(rank * size, count), min((rank + 1) * size, count))

    def _gather(self, array: mx.array, combine: Callable[[list[mx.array]], Any]) -> Any:
        """What is made of every rank's array; NCCL sends from NVIDIA's GPUs itself."""
        self.collectives += 1
        with mx.stream(mx.gpu if ON_CUDA else mx.cpu):
            gathered = mx.distributed.all_gather(array[None], group=self.group)
            return combine([gathered[i] for i in range(self.size)])


ALONE = Ranks()


def ranks_of(model: T5 | ExactTarget) -> Ranks:
    """The ranks that have to make the same calls of a model: those that `sharding.shard` names."""
    return getattr(model, "ranks", ALONE)
