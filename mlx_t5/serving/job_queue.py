"""The way of jobs into the thread that owns MLX, and of their events back to the event loop.

Where several ranks share the model, each has such a thread and all of them take the same jobs in
the same rounds. What clients ask, and who has gone, only rank 0 knows; the others get it as JSON
before each round.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from mlx_t5.network.ranks import ALONE, Ranks
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.errors import ApiError, client_gone
from mlx_t5.serving.jobs import (
    EmbeddingWork,
    GenerationWork,
    Job,
    ScoringWork,
    Update,
)
from mlx_t5.settings import Settings

LONGEST_RETRY = 60  # seconds that a client is asked to wait at most
REST_SECONDS = 10  # between two rounds with nothing to do
IDLE_SECONDS = 0.05  # the same of ranks, as waiting in a collective is work


class JobQueue:
    """The jobs that are not done; its methods may be called from any thread.

    Attributes:
        clock: seconds.
    """

    def __init__(
        self,
        max_batch: int,
        max_queue: int,
        clock: Callable[[], float],
        ranks: Ranks = ALONE,
    ):
        """Takes jobs until `close`.

        Args:
            max_batch: texts decoded at the same time.
            max_queue: texts that wait for a place at most.
            clock: seconds.
            ranks: that share the model; those other than 0 get the jobs of rank 0.
        """
        self._max_batch, self._max_queue, self.clock = max_batch, max_queue, clock
        self._ranks, self._numbers = ranks, itertools.count()
        self._changed = threading.Condition()
        self._jobs: dict[int, Job] = {}  # by number
        self._new: list[Job] = []
        self._withdrawn: list[int] = []  # numbers, since the last round
        self._progressed = 0.0  # when a round last ended, or there was something to do again
        self._closed: str | None = None  # why

    @property
    def open(self) -> bool:
        """Whether jobs are taken."""
        return self._closed is None

    @property
    def admitted(self) -> int:
        """Texts that are not done."""
        with self._changed:
            return sum(job.unfinished for job in self._jobs.values())

    @property
    def waited(self) -> float:
        """Seconds since the last progress; 0 if there is nothing to do."""
        with self._changed:
            return self.clock() - self._progressed if self._jobs else 0.0

    def add(self, job: Job, row_seconds: float) -> None:
        """Takes a job; `row_seconds` is how long a text takes on average.

        Raises:
            ApiError: there is no room for it, or the queue is closed.
        """
        with self._changed:
            if self._closed is not None:
                raise ApiError(503, self._closed)
            admitted = sum(other.unfinished for other in self._jobs.values())
            if admitted + job.size > self._max_batch + self._max_queue:
                seconds = math.ceil(admitted / self._max_batch * row_seconds)
                raise queue_full(max(1, min(seconds, LONGEST_RETRY)))
            job.submitted, job.number = self.clock(), next(self._numbers)
            if not self._jobs:
                self._progressed = job.submitted
            self._jobs[job.number] = job
            self._new.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Withdraws a job, from the thread's next round on. One that is done stays done."""
        with self._changed:
            if job.number in self._jobs:
                self._withdrawn.append(job.number)

    def close(self, reason: str) -> None:
        """Takes no more jobs, and says why to clients; of several reasons, the first."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def unfinished(self) -> list[Job]:
        """The jobs that are not done."""
        with self._changed:
            return list(self._jobs.values())

    def clear(self) -> list[Job]:
        """Forgets the jobs that are not done, and returns them."""
        with self._changed:
            jobs, self._jobs = list(self._jobs.values()), {}
        return jobs

    # ---- of the thread that owns MLX -------------------------------------------------------------

    def next_round(self, busy: bool) -> list[Job] | None:
        """Waits for jobs, unless the thread is busy, and marks those that are cancelled.

        After `REST_SECONDS` it waits no longer, so that there may be no new ones.

        Returns:
            The new jobs, the same on all ranks; None if no more will come and none is left.
        """
        with self._changed:
            timeout = REST_SECONDS if self._ranks.size == 1 else IDLE_SECONDS
            self._changed.wait_for(lambda: busy or self._new or not self.open, timeout)
            new, self._new = self._new, []
            cancelled, self._withdrawn = self._withdrawn, []
        last = not (self.open or busy or new)
        if self._ranks.size > 1:
            new, cancelled, last = self._shared(new, cancelled, last)
        for number in cancelled:
            if number in self._jobs:
                self._jobs[number].cancelled = True
        return None if last else new

    def _shared(
        self, new: list[Job], cancelled: list[int], last: bool
    ) -> tuple[list[Job], list[int], bool]:
        """What rank 0 knows, on every rank."""
        jobs = [[job.number, job.size, type(job.work).__name__, asdict(job.work)] for job in new]
        jobs, cancelled, last = self._ranks.shared([jobs, cancelled, last])
        if self._ranks.rank:
            # The client is on rank 0, so nobody here waits for an event.
            new = [
                Job(work_of(kind, fields), size, lambda event: None, number)
                for number, size, kind, fields in jobs
            ]
            with self._changed:
                self._jobs |= {job.number: job for job in new}
        return new, cancelled, last

    def progressed(self) -> None:
        """A round has ended."""
        self._progressed = self.clock()

    def put(self, job: Job, event: Update | list[Any] | ApiError) -> None:
        """Hands a job an event."""
        try:
            job.put(event)
        except RuntimeError:  # the event loop that the client belonged to has ended
            self.cancel(job)

    def release(self, job: Job, texts: int) -> None:
        """So many texts of a job are done."""
        with self._changed:
            job.unfinished -= texts
            if not job.unfinished:
                del self._jobs[job.number]


def work_of(kind: str, fields: dict[str, Any]) -> Any:
    """Work of which kind and fields came as JSON."""
    if kind == "GenerationWork":
        return GenerationWork(**{**fields, "settings": Settings(**fields["settings"])})
    if kind == "ScoringWork":
        pairs = [Pair(tuple(p["source"]), tuple(p["target"])) for p in fields["pairs"]]
        return ScoringWork(fields["kind"], pairs)
    return EmbeddingWork(**fields)


def queue_full(seconds: int) -> ApiError:
    """Makes the error of a queue that may have room after so many seconds."""
    message = f"the queue is full; try again in {seconds} s"
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(seconds)})


class EventStream:
    """The events of one job, in the event loop.

    Attributes:
        job: whose events they are.
    """

    def __init__(self, work: Any, size: int, cancel: Callable[[Job], None]):
        """Makes the job; `cancel` withdraws it."""
        self.job = Job(work, size, self._put)
        self._cancel = cancel
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def _put(self, event: Update | list[Any] | ApiError) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def watch(self, receive: Callable[[], Any]) -> None:
        """Withdraws the job once its client is gone; also ends when the response is complete."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.close()

    def close(self) -> None:
        """Withdraws the job, if it is not done."""
        self._cancel(self.job)
        self._events.put_nowait(client_gone())

    async def next(self) -> Any:
        """The next event.

        Raises:
            ApiError: the job has failed, or its client is gone.
        """
        event = await self._events.get()
        if isinstance(event, ApiError):
            raise event
        return event

    async def updates(self, first: Update) -> AsyncIterator[Update]:
        """All updates from `first` on, until every text is done."""
        update, unfinished = first, self.job.work.count
        while True:
            unfinished -= update.chunk.result is not None
            yield update
            if not unfinished:
                return
            update = await self.next()

    async def finished(self) -> list[Update]:
        """The last update of every text, in their order; for jobs that do not stream."""
        last = [update async for update in self.updates(await self.next())]
        return sorted(last, key=lambda update: update.index)
