"""Defines jobs, and the queue that hands them to the thread that owns MLX.

Every request becomes a job in the `JobQueue`. The thread gets new jobs in rounds, the iterations of
its loop, and sends their events; the event loop receives them from `events`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from mlx_t5.engine.document_results import DocumentInFlight
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.engine.rows import Chunk
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.api_error import ApiError
from mlx_t5.text.prompts import Prompt

REST_SECONDS = 10  # longest wait for work before a round

Event = Chunk | list[Any] | ApiError
Receive = Callable[[], Awaitable[Any]]  # of ASGI: returns the next message about the client


@dataclass(eq=False, kw_only=True)
class QueuedJob:
    """A job and its progress."""

    texts: int  # number of texts; a job that only scores counts as fewer than it has
    # Whether prompts are pieces of texts. If one fails, the others go on; else it ends the job.
    of_pieces: bool = False
    # Sends an event to the client: a `Chunk` of a text, the list of all values (scores or
    # vectors), or the `ApiError` that ends the job. The thread that owns MLX calls it, so it must
    # not wait.
    put: Callable[[Event], Any] = lambda event: None
    unfinished: int = 0  # texts that are not done
    submitted: float = 0.0  # by the queue's clock


@dataclass(eq=False, kw_only=True)
class GenerationJob(QueuedJob):
    """A job that decodes prompts."""

    request: GenerationRequest
    prompts: Sequence[Prompt]
    document: DocumentInFlight | None = None  # if all pieces belong to one text
    sources: Sequence[str] = ()  # the prompts as texts; none for those that are token ids


@dataclass(eq=False, kw_only=True)
class ScoringJob(QueuedJob):
    """A job that needs no decoding: it scores pairs of a prompt and a target, or embeds prompts."""

    texts: int = 1
    kind: str  # "score", "rerank" or "embed"
    prompt_tokens: int  # for the metrics
    pairs: list[Pair] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)  # of each prompt to embed
    normalize: bool = False
    values: dict[int, Any] = field(default_factory=dict)  # scores or vectors so far, by index

    @property
    def count(self) -> int:
        return len(self.pairs) + len(self.ids)


class JobQueue:
    """The jobs that are not done; new ones are accepted until `close`.

    Only the thread that owns MLX calls `next_round`; the other methods may be
    called in any thread.
    """

    def __init__(self, max_batch: int, max_queue: int, clock: Callable[[], float]):
        """Decodes at most `max_batch` texts at a time; at most `max_queue` texts wait."""
        self.max_batch, self._max_queue, self.clock = max_batch, max_queue, clock
        self._changed = threading.Condition()
        self._jobs: dict[QueuedJob, None] = {}  # an ordered set
        self._new: list[QueuedJob] = []
        self._cancelled: list[QueuedJob] = []  # since the last round
        self._progressed = 0.0  # end of the last round, or arrival of the first job after it
        self._closed: str | None = None  # the reason

    @property
    def open(self) -> bool:
        return self._closed is None

    @property
    def admitted(self) -> int:
        """The number of slots taken by texts that are being decoded or wait."""
        with self._changed:
            return sum(self._slots(job, job.unfinished) for job in self._jobs)

    def _slots(self, job: QueuedJob, texts: int) -> int:
        """The number of slots that texts of a job take; a long document takes no more than run."""
        return min(texts, self.max_batch) if job.of_pieces else texts

    @property
    def waited(self) -> float:
        """Seconds since the last round ended, or a job came to an empty queue; 0 without jobs."""
        with self._changed:
            return self.clock() - self._progressed if self._jobs else 0.0

    def add(self, job: QueuedJob) -> None:
        """Adds a job; raises `ApiError` if the queue has no room for it, or is closed."""
        with self._changed:
            if self._closed is not None:
                raise ApiError(503, self._closed)
            slots = self.admitted + self._slots(job, job.texts)
            if slots > self.max_batch + self._max_queue:
                raise ApiError(429, "the queue is full; try again later", code="queue_full")
            job.submitted = self.clock()
            job.unfinished = job.texts
            if not self._jobs:
                self._progressed = job.submitted
            self._jobs[job] = None
            self._new.append(job)
            self._changed.notify()

    def cancel(self, job: QueuedJob) -> None:
        """Cancels a job at the beginning of the next round; does nothing if the job is finished."""
        with self._changed:
            if job in self._jobs and job not in self._cancelled:
                self._cancelled.append(job)
                self._changed.notify()

    def close(self, reason: str) -> None:
        """Refuses new jobs from now on, with the reason that the first call to `close` gave."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def unfinished(self) -> list[QueuedJob]:
        with self._changed:
            return list(self._jobs)

    def next_round(self, busy: bool) -> tuple[list[QueuedJob], list[QueuedJob]] | None:
        """Waits for new or cancelled jobs unless the thread is busy.

        Returns:
            The new and the cancelled jobs; after `REST_SECONDS` both lists may be empty. None if
            the queue is closed and no job is left.
        """
        with self._changed:
            self._progressed = self.clock()
            if not busy:
                self._changed.wait_for(self._has_changes, REST_SECONDS)
            if not (self.open or self._jobs):
                return None
            new, cancelled = self._new, self._cancelled
            self._new, self._cancelled = [], []
            return new, cancelled

    def _has_changes(self) -> bool:
        return bool(self._new or self._cancelled) or not (self.open or self._jobs)

    def put(self, job: QueuedJob, event: Event) -> None:
        """Sends an event to the client; cancels the job if the server's event loop has ended."""
        try:
            job.put(event)
        except RuntimeError:  # the server's event loop has ended
            self.cancel(job)

    def release(self, job: QueuedJob, texts: int) -> None:
        """Counts texts of a job as done; removes the job when it has no text left."""
        with self._changed:
            job.unfinished -= texts
            if not job.unfinished:
                self._jobs.pop(job, None)


async def events(job: QueuedJob, jobs: JobQueue, receive: Receive) -> AsyncGenerator[Any, None]:
    """Submits a job, and yields its events: chunks until all texts are finished, or one list.

    The job is cancelled if the generator is closed early, or if the client leaves. A document
    without words is not submitted, because nothing of it is decoded.

    Raises:
        ApiError: the queue is full or closed, the job failed, or the client left.
    """
    received: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    # The thread that owns MLX calls this.
    job.put = lambda event: loop.call_soon_threadsafe(received.put_nowait, event)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # the event also comes when the response is complete
        jobs.cancel(job)
        received.put_nowait(ApiError(499, "the client went away"))

    unfinished = job.texts
    if not unfinished:
        return
    jobs.add(job)
    watching = asyncio.create_task(watch())
    try:
        while unfinished:
            event = await received.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, list):
                unfinished = 0
            elif event.result:
                unfinished -= 1
            yield event
    finally:
        watching.cancel()
        jobs.cancel(job)


async def last_chunks(chunks: AsyncGenerator[Any, None]) -> list[Any]:
    """The chunks of a job that does not stream, one for each text, in the order of the texts."""
    async with aclosing(chunks):
        return sorted([chunk async for chunk in chunks], key=lambda chunk: chunk.index)
