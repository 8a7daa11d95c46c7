"""Jobs on their way into the thread that owns MLX, and how many of their rows are not done.

All methods may be called from any thread. Rows are counted as the client sees them: a text each.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from mlx_t5.serving.jobs import Job, PassJob, QueueFull, Stopped

LONGEST_RETRY = 60  # seconds that a client is asked to wait at most


class Intake:
    """Jobs that are not done, the new ones among them."""

    def __init__(self, max_batch: int, max_queue: int, clock: Callable[[], float]):
        """Takes jobs until `close`.

        Args:
            max_batch: rows decoded at the same time.
            max_queue: rows that wait for a place at most.
            clock: seconds.
        """
        self._max_batch, self._max_queue, self._clock = max_batch, max_queue, clock
        self._changed = threading.Condition()
        self._new: list[Job | PassJob] = []
        self._left: dict[Job | PassJob, int] = {}  # how many rows they still have
        self._progressed = 0.0  # when a round last ended, or there was something to do again
        self._withdrawn = False
        self._closed: str | None = None  # why

    @property
    def open(self) -> bool:
        """Whether jobs are taken."""
        return self._closed is None

    @property
    def admitted(self) -> int:
        """Rows that are not done."""
        with self._changed:
            return sum(self._left.values())

    @property
    def waited(self) -> float:
        """Seconds since the last progress; 0 if there is nothing to do."""
        with self._changed:
            return self._clock() - self._progressed if self._left else 0.0

    def add(self, job: Job | PassJob, row_seconds: float) -> None:
        """Takes a job.

        Args:
            job: of the client.
            row_seconds: how long a row stays in the batch, on average.

        Raises:
            QueueFull: there is no room for its rows.
            Stopped: the intake is closed.
        """
        with self._changed:
            if self._closed is not None:
                raise Stopped(self._closed)
            admitted = sum(self._left.values())
            if admitted + job.size > self._max_batch + self._max_queue:
                turns = math.ceil(admitted / self._max_batch * row_seconds)
                raise QueueFull(max(1, min(turns, LONGEST_RETRY)))
            job.submitted = self._clock()
            if not self._left:
                self._progressed = job.submitted
            self._left[job] = job.size
            self._new.append(job)
            self._changed.notify()

    def withdraw(self, job: Job | PassJob) -> None:
        """Nobody waits for a job any longer. One that is done stays done."""
        with self._changed:
            job.cancelled = self._withdrawn = True
            self._changed.notify()

    def close(self, reason: str) -> None:
        """Takes no more jobs, and tells clients why; of several reasons, the first."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def wait(self, busy: bool) -> bool:
        """Waits for a new job, unless the thread is busy; returns False if none will come."""
        with self._changed:
            self._changed.wait_for(lambda: busy or self._new or self._closed is not None)
            return bool(busy or self._new)

    def progressed(self) -> None:
        """A round has ended."""
        self._progressed = self._clock()

    def take(self) -> list[Job | PassJob]:
        """The new jobs, once."""
        with self._changed:
            jobs, self._new = self._new, []
        return jobs

    def take_withdrawn(self) -> bool:
        """Whether jobs have been withdrawn since the last call."""
        with self._changed:
            withdrawn, self._withdrawn = self._withdrawn, False
        return withdrawn

    def release(self, job: Job | PassJob, rows: int) -> None:
        """So many rows of a job are done."""
        with self._changed:
            self._left[job] -= rows
            if not self._left[job]:
                del self._left[job]

    def unfinished(self) -> list[Job | PassJob]:
        """The jobs that are not done."""
        with self._changed:
            return list(self._left)

    def abandon(self, reason: str) -> list[Job | PassJob]:
        """As `close`; returns the jobs that will not be done."""
        with self._changed:
            self._closed = reason
            jobs, self._left = list(self._left), {}
        return jobs
