"""Collectives between ranks: sums, concatenations of columns, and copies of rank 0's values.

The ranks are the processes of a group of `mx.distributed`. A sum gathers the terms of all ranks and
adds them in rank order. So every rank has the same bits on any backend, and a row's bits do not
depend on its place in the array. In a usual all-reduce each rank adds one segment, and bits depend
on the place. For few ranks, gathering moves about as many bytes as an all-reduce, and in a ring it
needs half the hops: n - 1 instead of 2 (n - 1).

Every rank runs the same loop, so it makes the same collectives in the same order. Values that could
differ between ranks (a sampled token, a time, free memory) are copied from rank 0, or combined over
all ranks, before anything depends on them.

On Metal the CPU computes the collectives: macOS aborts GPU work that waits for about five seconds,
and a rank may take minutes to load its model.

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
    """The ranks of a group; without a group, a single rank.

    Attributes:
        group: a group of `mx.distributed`; None for a process alone.
        rank: this process's number, from 0.
        size: number of ranks n.
        collectives: number of collectives that this process has made.
    """

    def __init__(self, group: Any = None) -> None:
        """Starts with a group from `mx.distributed.init`; None for a process alone."""
        self.group = group
        self.rank: int = group.rank() if group else 0
        self.size: int = group.size() if group else 1
        self.collectives = 0

    def sum(self, term: mx.array) -> mx.array:
        """Returns the sum of all ranks' arrays, in rank order; shapes and types must be equal."""
        return term if self.size == 1 else self._gather(term, partial(reduce, add))

    def columns(self, shard: mx.array, count: int) -> mx.array:
        """Returns the columns of all ranks, concatenated to an array (M rows, V columns).

        Args:
            shard: this rank's columns of all M rows: the slice `share(count)` of the V columns.
            count: number of columns V of all ranks together.
        """
        if self.size == 1:
            return shard
        width = self.share(count, 0).stop
        padded = mx.pad(shard, ((0, 0), (0, width - shard.shape[1])))
        return self._gather(padded, lambda shards: mx.concatenate(shards, axis=1)[:, :count])

    def of_first(self, array: mx.array) -> mx.array:
        """Returns rank 0's array; shapes and types must be equal on all ranks."""
        return array if self.size == 1 else self._gather(array, itemgetter(0))

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return any(self.gathered(flag))

    def gathered(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order; values must be JSON-serializable."""
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        with self.in_step():
            longest = max(size.item() for size in self._gather(mx.array(len(data)), list))
            parts = self._gather(mx.array(np.frombuffer(data.ljust(longest), np.uint8)), list)
            return [json.loads(np.array(part).tobytes()) for part in parts]

    def shared(self, value: Any) -> Any:
        """Returns rank 0's value, which must be JSON-serializable, on every rank."""
        return value if self.size == 1 else self.gathered(None if self.rank else value)[0]

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Runs work that all ranks do together, and that none can continue if one fails.

        Raises:
            RanksApart: in place of a RuntimeError or MemoryError, if there are several ranks.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self.size == 1:
                raise
            raise RanksApart(error) from error

    def share(self, count: int, rank: int | None = None) -> slice:
        """Returns a rank's slice of `count` rows.

        A slice has ceil(count / number of ranks) rows; the last slices may have fewer or none.

        Args:
            count: number of all rows.
            rank: the rank; None is this rank.
        """
        rank, size = self.rank if rank is None else rank, -(-count // self.size)
        return slice(min(rank * size, count), min((rank + 1) * size, count))

    def _gather(self, array: mx.array, combine: Callable[[list[mx.array]], Any]) -> Any:
        """Returns `combine(arrays of all ranks)`, on the CPU or, with NCCL, on a CUDA GPU."""
        self.collectives += 1
        with mx.stream(mx.gpu if ON_CUDA else mx.cpu):
            gathered = mx.distributed.all_gather(array[None], group=self.group)
            return combine([gathered[i] for i in range(self.size)])


ALONE = Ranks()


def ranks_of(model: T5 | ExactTarget) -> Ranks:
    """Returns the ranks that share a model; `ALONE` if this process has the whole model."""
    return getattr(model, "ranks", ALONE)
