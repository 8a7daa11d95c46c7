"""Defines jobs, and the queue that hands them to the thread that owns MLX.

Every request becomes a job in the `JobQueue`. The thread gets new jobs in rounds, the iterations of
its loop.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_t5.engine.document_batch import DocumentInFlight
from mlx_t5.engine.job import Job
from mlx_t5.engine.rows import Chunk
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.api_error import ApiError

LONGEST_RETRY = 60  # maximum of Retry-After in seconds
REST_SECONDS = 10  # longest wait for work before a round

Event = Chunk | list[Any] | ApiError


@dataclass(eq=False, kw_only=True)
class QueuedJob:
    """A job, its places in the queue, and its progress.

    Attributes:
        size: number of places that the job takes in the queue at most.
        texts: number of texts; for other jobs than decoding, number of places.
        put: sends an event to the client: a `Chunk` of a text, the list of all values (scores,
            vectors), or the `ApiError` that ends the job. The thread that owns MLX calls it, so it
            must not wait.
        unfinished: number of texts that are not done.
        submitted: time of submission, by the queue's clock.
    """

    size: int
    texts: int
    put: Callable[[Event], None] = lambda event: None
    unfinished: int = 0
    submitted: float = 0.0

    @property
    def places(self) -> int:
        """The number of places that the job still takes in the queue."""
        return min(self.size, self.unfinished)


@dataclass(eq=False, kw_only=True)
class GenerationJob(QueuedJob):
    """A job that decodes prompts.

    Attributes:
        spec: how the prompts are decoded.
        prompts: the prompts, as text or token ids.
        document: the document whose pieces the prompts are. A piece that fails is reported as such,
            whereas another prompt that fails ends the job.
    """

    spec: Job
    prompts: Sequence[str | list[int]]
    document: DocumentInFlight | None = None


@dataclass(eq=False, kw_only=True)
class ScoringJob(QueuedJob):
    """A job that needs no decoding: it scores pairs of a prompt and a target, or embeds prompts.

    Attributes:
        kind: "score", "rerank" or "embed".
        prompt_tokens: number of tokens of the job's prompts, for the metrics.
        pairs: the pairs to score.
        ids: token ids of each prompt to embed.
        normalize: whether to scale vectors to length 1.
    """

    size: int = 1
    texts: int = 1
    kind: str
    prompt_tokens: int
    pairs: list[Pair] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    normalize: bool = False

    @property
    def count(self) -> int:
        """The number of scores or vectors that the job returns."""
        return len(self.pairs) + len(self.ids)


class JobQueue:
    """The jobs that are not done.

    Only the thread that owns MLX calls `next_round` and `progressed`; the other methods may be
    called in any thread.

    Attributes:
        clock: returns seconds.
        row_seconds: moving average of the time to encode and decode a row.
    """

    def __init__(self, max_batch: int, max_queue: int, clock: Callable[[], float]):
        """Makes an empty queue, which accepts jobs until `close`.

        Args:
            max_batch: maximum number of texts decoded at the same time.
            max_queue: maximum number of waiting texts.
            clock: returns seconds.
        """
        self._max_batch, self._max_queue, self.clock = max_batch, max_queue, clock
        self.row_seconds = 0.0
        self._changed = threading.Condition()
        self._jobs: dict[QueuedJob, None] = {}  # an ordered set
        self._new: list[QueuedJob] = []
        self._cancelled: list[QueuedJob] = []  # since the last round
        self._progressed = 0.0  # end of the last round, or arrival of the first job after it
        self._closed: str | None = None  # the reason

    @property
    def open(self) -> bool:
        """Whether jobs are accepted."""
        return self._closed is None

    @property
    def admitted(self) -> int:
        """The number of places taken by texts that are being decoded or wait."""
        with self._changed:
            return sum(job.places for job in self._jobs)

    @property
    def waited(self) -> float:
        """How many seconds the jobs have waited for the current round to end; 0 without jobs.

        The wait begins when the last round ends, or when a job comes to an empty queue.
        """
        with self._changed:
            return self.clock() - self._progressed if self._jobs else 0.0

    def add(self, job: QueuedJob) -> None:
        """Adds a job.

        Raises:
            ApiError: the queue has no room for the job, or is closed.
        """
        with self._changed:
            if self._closed is not None:
                raise ApiError(503, self._closed)
            if self.admitted + job.size > self._max_batch + self._max_queue:
                seconds = math.ceil(self.admitted / self._max_batch * self.row_seconds)
                seconds = max(1, min(seconds, LONGEST_RETRY))
                message, headers = f"try again in {seconds} s", {"Retry-After": str(seconds)}
                raise ApiError(429, f"the queue is full; {message}", None, "queue_full", headers)
            job.submitted, job.unfinished = self.clock(), job.texts
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
        """Returns the jobs that are not done."""
        with self._changed:
            return list(self._jobs)

    def next_round(self, busy: bool) -> tuple[list[QueuedJob], list[QueuedJob]] | None:
        """Waits for new or cancelled jobs unless the thread is busy.

        The wait ends after `REST_SECONDS` at the latest, so both lists may be empty.

        Returns:
            The new and the cancelled jobs; None if the queue is closed and no job is left.
        """
        with self._changed:
            ended = lambda: not (self.open or self._jobs)  # noqa: E731
            self._changed.wait_for(
                lambda: busy or self._new or self._cancelled or ended(), REST_SECONDS
            )
            new, cancelled, self._new, self._cancelled = self._new, self._cancelled, [], []
            return None if ended() else (new, cancelled)

    def progressed(self) -> None:
        """Notes that a round has ended."""
        self._progressed = self.clock()

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
