"""Ranks as threads of this process, which exchange values but share no computation."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from mlx_t5.network.ranks import Ranks


class Meeting:
    """A meeting at which `size` ranks exchange values."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """Runs the work of each rank; returns its results or the exceptions that it raises."""
        found: list[Any] = [None] * self.size

        def begin(rank: int) -> None:
            try:
                found[rank] = work(Present(self, rank))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=begin, args=(i,)) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class Present(Ranks):
    """A rank of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def gathered(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = json.dumps(value)
        self._meeting.barrier.wait()
        found = [json.loads(each) for each in self._meeting.values]
        self._meeting.barrier.wait()
        return found
