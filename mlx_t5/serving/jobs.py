"""Defines jobs, and the queue that hands them to the thread that owns MLX.

Every request becomes a job in the `JobQueue`. The thread gets new jobs in rounds, the
iterations of its loop.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mlx_t5.engine.job import Job
from mlx_t5.engine.rows import Chunk
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.api_error import ApiError

LONGEST_RETRY = 60  # maximum of Retry-After in seconds
REST_SECONDS = 10  # longest wait for work before a round


@dataclass(eq=False)
class Place:
    """A job's place in the queue, and its progress.

    Attributes:
        size: number of places that the job takes in the queue; usually its number of texts. For a
            document, it is the maximum number of rows at a time.
        unfinished: number of places that the job still takes; `size` when the job is submitted.
        cancelled: whether the job is cancelled; set only at the start of a round (loop iteration).
        submitted: time of submission, by the queue's clock.
        texts: number of texts that already have a row.
        pieces: for a document, the source tokens of each submitted piece that has no row yet.
        whole: for a document, whether all its pieces have been submitted.
        put: sends an event to the client. The thread that owns MLX calls `put`, which must not
            wait. An event is a `Chunk` of a text, the list of all values (scores, vectors), or the
            `ApiError` that ends the job.
    """

    size: int = 1
    unfinished: int = 0
    cancelled: bool = False
    submitted: float = 0.0
    texts: int = 0
    pieces: list[list[int]] = field(default_factory=list)
    whole: bool = False
    put: Callable[[Chunk | list[Any] | ApiError], None] = lambda event: None


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationJob(Job):
    """A job that decodes prompts, or a document piece by piece.

    Attributes:
        prompts: source tokens of each prompt; empty for a document, whose pieces are in `place`.
        document: whether the job is a document. If a piece of a document fails, the job continues.
        place: the job's place in the queue. For a document, it also has the pieces that wait.
    """

    prompts: list[list[int]] = field(default_factory=list)
    document: bool = False
    place: Place = field(default_factory=Place)


@dataclass(frozen=True, eq=False)
class ScoringJob:
    """A job that needs no decoding: it scores pairs of a prompt and a target, or embeds prompts.

    Attributes:
        kind: "score", "rerank" or "embed".
        prompt_tokens: number of tokens of the job's prompts, for the metrics.
        pairs: the pairs to score.
        ids: token ids of each prompt to embed.
        normalize: whether to scale vectors to length 1.
        place: the job's place in the queue.
    """

    kind: str
    prompt_tokens: int
    pairs: list[Pair] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    normalize: bool = False
    place: Place = field(default_factory=Place)

    @property
    def count(self) -> int:
        """The number of scores or vectors that the job returns."""
        return len(self.pairs) + len(self.ids)


QueuedJob: TypeAlias = GenerationJob | ScoringJob


class JobQueue:
    """The jobs that are not done.

    Only the thread that owns MLX calls `next_round`. The other methods may be called in any thread.

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
        # further pieces of documents: job, prompts, whether they are the last
        self._more: list[tuple[GenerationJob, Sequence[list[int]], bool]] = []
        self._withdrawn: list[QueuedJob] = []  # cancelled since the last round
        self._progressed = 0.0  # end of the last round, or arrival of the first job after it
        self._closed: str | None = None  # the reason

    @property
    def open(self) -> bool:
        """Whether jobs are accepted."""
        return self._closed is None

    @property
    def admitted(self) -> int:
        """The number of texts that are not done: those being decoded and those that wait."""
        with self._changed:
            return sum(job.place.unfinished for job in self._jobs)

    @property
    def waited(self) -> float:
        """How many seconds the jobs have waited for the current round to end; 0 without jobs.

        A round is an iteration of the loop of the thread that owns MLX. The wait begins when the
        last round ends, or when a job comes to an empty queue.
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
            if self.admitted + job.place.size > self._max_batch + self._max_queue:
                seconds = math.ceil(self.admitted / self._max_batch * self.row_seconds)
                seconds = max(1, min(seconds, LONGEST_RETRY))
                message, headers = f"try again in {seconds} s", {"Retry-After": str(seconds)}
                raise ApiError(429, f"the queue is full; {message}", None, "queue_full", headers)
            place = job.place
            place.submitted, place.unfinished = self.clock(), place.size
            if not self._jobs:
                self._progressed = place.submitted
            self._jobs[job] = None
            self._new.append(job)
            self._changed.notify()

    def extend(self, job: GenerationJob, prompts: Sequence[list[int]], whole: bool) -> None:
        """Adds further pieces of a document; `whole`: whether these are the last pieces."""
        with self._changed:
            self._more.append((job, prompts, whole))
            self._changed.notify()

    def cancel(self, job: QueuedJob) -> None:
        """Cancels a job at the beginning of the next round; does nothing if the job is finished."""
        with self._changed:
            if job in self._jobs:
                self._withdrawn.append(job)
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

    # ---- of the thread that owns MLX -------------------------------------------------------------

    def next_round(self, busy: bool) -> list[QueuedJob] | None:
        """Waits for jobs unless the thread is busy; adds pieces to documents; marks cancelled jobs.

        The wait ends after `REST_SECONDS` at the latest, so the returned list may be empty.

        Returns:
            The new jobs; None if the queue is closed and no job is left.
        """
        with self._changed:
            ended = lambda: not (self.open or self._jobs)  # noqa: E731
            self._changed.wait_for(
                lambda: busy or self._new or self._more or self._withdrawn or ended(), REST_SECONDS
            )
            for document, prompts, whole in self._more:
                document.place.pieces.extend(prompts)
                document.place.whole = whole
            for job in self._withdrawn:
                job.place.cancelled = True
            new, self._new, self._more, self._withdrawn = self._new, [], [], []
            return None if ended() else new

    def progressed(self) -> None:
        """Notes that a round (an iteration of the thread's loop) has ended."""
        self._progressed = self.clock()

    def put(self, job: QueuedJob, event: Chunk | list[Any] | ApiError) -> None:
        """Sends an event to the client; cancels the job if the server's event loop has ended."""
        try:
            job.place.put(event)
        except RuntimeError:  # the server's event loop has ended
            self.cancel(job)

    def release(self, job: QueuedJob, texts: int) -> None:
        """Frees places of a job, as many as `texts`; removes the job when it has no place left."""
        with self._changed:
            job.place.unfinished -= texts
            if not job.place.unfinished:
                self._jobs.pop(job, None)
