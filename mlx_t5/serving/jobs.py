"""The queue of the thread that owns MLX: jobs go in, events come out.

Every request becomes a `QueuedJob` in the `JobQueue`. If several ranks share the model, each has
such a thread, and all take the same jobs in the same rounds. Only rank 0 knows the requests of the
clients and which clients have gone; the others get this as JSON before each round.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_t5.engine.job import Job
from mlx_t5.engine.rows import Chunk
from mlx_t5.network.ranks import ALONE, Ranks
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.api_error import ApiError
from mlx_t5.settings import Settings

LONGEST_RETRY = 60  # maximum of Retry-After in seconds
REST_SECONDS = 10  # between two rounds without work
IDLE_SECONDS = 0.05  # the same with several ranks, as waiting in a collective takes CPU time


@dataclass(frozen=True)
class TokenLogprob:
    """One written token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens at its position with their log-probabilities, likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Update:
    """The part of one text that was added since the last update.

    Attributes:
        index: the text's index in its job: prompt · samples + sample.
        chunk: the added part, with a copy of the statistics; the last one has the result.
        logprobs: those of the chunk's tokens, if requested; the end token's if the chunk has no
            tokens but text that was held back.
        fields: further fields of the choice in the answer.
    """

    index: int
    chunk: Chunk
    logprobs: list[TokenLogprob]
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class QueuedJob:
    """The work of one request; its fields are sent to all ranks.

    Attributes:
        size: number of texts that it counts for in the queue, and has there at a time.
        put: called with every event, from the thread that owns MLX; it must not wait. An event is
            an `Update` of a text, the list of all values (scores, vectors), or the `ApiError` that
            ends the job. On ranks without the client it does nothing.
        number: its number in the queue, the same on every rank.
        unfinished: how many of `size` are not done.
        cancelled: whether its client has gone; set by the thread at the beginning of a round.
        submitted: time of submission, by the queue's clock.
    """

    size: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        self.put: Callable[[Update | list[Any] | ApiError], None] = lambda event: None
        self.number, self.unfinished = -1, self.size
        self.cancelled, self.submitted = False, 0.0


@dataclass(eq=False)
class GenerationJob(QueuedJob):
    """Prompts to decode alike, with beams or without.

    Attributes:
        prompts: source tokens of each prompt; for a document, the pieces that are no rows yet.
        spec: what the engine is asked; its samples may be beams of one row.
        prediction: expected tokens of every text; None for none.
        stream: whether updates are sent while rows grow; otherwise one a text, at its end.
        pieces: whether chunks have the text that each token completed.
        logprobs: alternatives a token; None for no log-probabilities.
        document: whether the prompts are pieces of one document; a failed piece ends no other.
        whole: for a document, whether all its pieces have been submitted.
        keys: random keys of the rows still to be made.
        texts: number of texts of the rows made so far.
    """

    prompts: list[list[int]]
    spec: Job
    prediction: Sequence[int] | None = None
    stream: bool = False
    pieces: bool = False
    logprobs: int | None = None
    document: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole, self.texts = False, 0
        self.keys: Iterator[Any] = iter(())

    @property
    def watched(self) -> bool:
        """Whether its texts have to be read while they grow."""
        return self.stream or self.pieces or self.logprobs is not None


@dataclass(eq=False)
class ScoringJob(QueuedJob):
    """A job of single forward passes without decoding: pairs to score, or prompts to embed.

    Attributes:
        kind: "score", "rerank" or "embed".
        prompt_tokens: number of tokens of its prompts.
        pairs: the pairs to score.
        ids: token ids of each prompt to embed.
        normalize: whether to scale vectors to length 1.
    """

    kind: str
    prompt_tokens: int
    pairs: list[Pair] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    normalize: bool = False

    @property
    def count(self) -> int:
        """The number of its values."""
        return len(self.pairs) + len(self.ids)


class JobQueue:
    """The jobs that are not done; its methods may be called from any thread.

    Attributes:
        clock: returns seconds.
        row_seconds: time that a text takes in a batch, a moving average.
    """

    def __init__(
        self,
        max_batch: int,
        max_queue: int,
        clock: Callable[[], float],
        ranks: Ranks = ALONE,
    ):
        """Accepts jobs until `close`.

        Args:
            max_batch: texts decoded at the same time.
            max_queue: maximum of waiting texts.
            clock: returns seconds.
            ranks: the ranks that share the model; the others get the jobs of rank 0.
        """
        self._max_batch, self._max_queue, self.clock = max_batch, max_queue, clock
        self.row_seconds = 0.0
        self._ranks, self._numbers = ranks, itertools.count()
        self._changed = threading.Condition()
        self._jobs: dict[int, QueuedJob] = {}  # by number
        self._new: list[QueuedJob] = []
        self._more: list[list[Any]] = []  # prompts of jobs: number, prompts, whether they are last
        self._withdrawn: list[int] = []  # numbers of jobs cancelled since the last round
        self._progressed = 0.0  # when a round last ended, or work came after a rest
        self._closed: str | None = None  # the reason

    @property
    def open(self) -> bool:
        """Whether jobs are accepted."""
        return self._closed is None

    @property
    def admitted(self) -> int:
        """The number of texts that are not done."""
        with self._changed:
            return sum(job.unfinished for job in self._jobs.values())

    @property
    def waited(self) -> float:
        """Seconds since the last progress; 0 if there is nothing to do."""
        with self._changed:
            return self.clock() - self._progressed if self._jobs else 0.0

    def add(self, job: QueuedJob) -> None:
        """Adds a job.

        Raises:
            ApiError: there is no room for it, or the queue is closed.
        """
        with self._changed:
            if self._closed is not None:
                raise ApiError(503, self._closed)
            if self.admitted + job.size > self._max_batch + self._max_queue:
                seconds = math.ceil(self.admitted / self._max_batch * self.row_seconds)
                seconds = max(1, min(seconds, LONGEST_RETRY))
                message, headers = f"try again in {seconds} s", {"Retry-After": str(seconds)}
                raise ApiError(429, f"the queue is full; {message}", None, "queue_full", headers)
            job.submitted, job.number = self.clock(), next(self._numbers)
            job.unfinished = job.size
            if not self._jobs:
                self._progressed = job.submitted
            self._jobs[job.number] = job
            self._new.append(job)
            self._changed.notify()

    def extend(self, job: GenerationJob, prompts: Sequence[Sequence[int]], whole: bool) -> None:
        """Adds further pieces of a document; `whole` if they are the last."""
        with self._changed:
            self._more.append([job.number, prompts, whole])
            self._changed.notify()

    def cancel(self, job: QueuedJob) -> None:
        """Cancels a job at the thread's next round; has no effect on a finished job."""
        with self._changed:
            if job.number in self._jobs:
                self._withdrawn.append(job.number)
                self._changed.notify()

    def close(self, reason: str) -> None:
        """Accepts no more jobs; clients are told the first reason given."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def unfinished(self) -> list[QueuedJob]:
        """The jobs that are not done."""
        with self._changed:
            return list(self._jobs.values())

    # ---- of the thread that owns MLX -------------------------------------------------------------

    def next_round(self, busy: bool) -> list[QueuedJob] | None:
        """Waits for jobs, unless the thread is busy, and marks cancelled jobs.

        It waits at most `REST_SECONDS`, so the list may be empty.

        Returns:
            The new jobs, the same on all ranks; None if the queue is closed and no job is left.
        """
        with self._changed:
            timeout = REST_SECONDS if self._ranks.size == 1 else IDLE_SECONDS
            told = lambda: self._new or self._more or self._withdrawn  # noqa: E731
            self._changed.wait_for(lambda: busy or told() or not (self.open or self._jobs), timeout)
            news = self._more, self._withdrawn, not (self.open or self._jobs)
            new, self._new, self._more, self._withdrawn = self._new, [], [], []
        if self._ranks.size > 1:
            new, news = self._shared(new, news)
        more, cancelled, last = news
        for number, prompts, whole in more:
            if isinstance(job := self._jobs.get(number), GenerationJob):
                job.prompts.extend(prompts)
                job.whole = whole
        for number in cancelled:
            if number in self._jobs:
                self._jobs[number].cancelled = True
        return None if last else new

    def _shared(self, new: list[QueuedJob], news: Any) -> tuple[list[QueuedJob], Any]:
        """Sends rank 0's new jobs and news to every rank."""
        jobs = [[job.number, type(job).__name__, asdict(job)] for job in new]
        jobs, news = self._ranks.shared([jobs, news])
        if self._ranks.rank:
            new = [_job_of(*fields) for fields in jobs]
            with self._changed:
                self._jobs |= {job.number: job for job in new}
        return new, news

    def progressed(self) -> None:
        """Notes that a round has ended."""
        self._progressed = self.clock()

    def put(self, job: QueuedJob, event: Update | list[Any] | ApiError) -> None:
        """Sends an event to a job."""
        try:
            job.put(event)
        except RuntimeError:  # the client's event loop has ended
            self.cancel(job)

    def release(self, job: QueuedJob, texts: int) -> None:
        """Notes that so many texts of a job are done."""
        with self._changed:
            job.unfinished -= texts
            if not job.unfinished:
                self._jobs.pop(job.number, None)


def _job_of(number: int, kind: str, fields: dict[str, Any]) -> QueuedJob:
    """Returns a job made from the number, kind and fields of a rank's JSON."""
    job: QueuedJob
    if kind == "GenerationJob":
        spec = fields["spec"]
        spec = Job(Settings(**spec.pop("settings")), **spec)
        job = GenerationJob(**{**fields, "spec": spec})
    else:
        pairs = [Pair(tuple(p["source"]), tuple(p["target"])) for p in fields["pairs"]]
        job = ScoringJob(**{**fields, "pairs": pairs})
    job.number = number
    return job
