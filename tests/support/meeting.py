"""Runs ranks as threads of this process; they exchange values but share no computation."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from mlx_t5.network.ranks import Ranks


class Present(Ranks):
    """A rank that runs as a thread, see `meet`."""

    def __init__(self, rank, values, barrier):
        super().__init__()
        self.rank, self.size, self._values, self._barrier = rank, len(values), values, barrier

    def gathered(self, value):
        self._values[self.rank] = json.dumps(value)
        self._barrier.wait()
        values = list(map(json.loads, self._values))
        self._barrier.wait()
        return values


def meet(size, work):
    """Runs `work(rank)` for each rank; returns its results or the exceptions that it raises."""
    values, barrier = [None] * size, threading.Barrier(size, timeout=60)

    def outcome(rank):
        try:
            return work(Present(rank, values, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(outcome, range(size)))
