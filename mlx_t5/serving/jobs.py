"""What goes into the thread that owns MLX and what comes out: jobs in, events out.

Requests of every kind take the same way: a `Job` with its work, through the `JobQueue`. Where
several ranks share the model, each has such a thread and all of them take the same jobs in the same
rounds. What clients ask, and who has gone, only rank 0 knows; the others get it as JSON before each
round.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_t5.engine.batching import MAX_JOINING_TOKENS
from mlx_t5.engine.rows import Chunk
from mlx_t5.network.ranks import ALONE, Ranks
from mlx_t5.scoring.pairs import LastEncoded, Pair
from mlx_t5.serving.errors import ApiError
from mlx_t5.settings import Settings

if TYPE_CHECKING:
    from mlx_t5.scoring.passes import Part

LONGEST_RETRY = 60  # seconds that a client is asked to wait at most
REST_SECONDS = 10  # between two rounds with nothing to do
IDLE_SECONDS = 0.05  # the same of ranks, as waiting in a collective is work


@dataclass(frozen=True)
class TokenLogprob:
    """One written token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens there and theirs, likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Update:
    """What one text of a generation has gained.

    Attributes:
        index: of the text in its job: prompt · samples + sample.
        chunk: since the last update, with statistics of its own; its result is in the last one.
        logprobs: of the tokens in the chunk, if asked for; of the end token if there are none, but
            text that was held back.
        fields: further ones of the choice in the answer.
    """

    index: int
    chunk: Chunk
    logprobs: list[TokenLogprob]
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationWork:
    """Prompts to decode with the same settings, with beams or without.

    Attributes:
        prompts: source tokens of each; none of a document, whose job gets them one after the other.
        settings: of all of them.
        seed: as in `SpeculativeDecoder.generate`.
        prediction: tokens that every text is expected to have; None for nothing.
        samples: texts a prompt, of rows of their own or of one row with beams.
        stream: whether updates are sent while rows grow; otherwise one a text, at its end.
        pieces: whether chunks are to say which text each token completed.
        logprobs: alternatives a token, None for no log-probabilities.
        document: whether they are the pieces of one text, where one that fails ends no other.
    """

    prompts: Sequence[Sequence[int]]
    settings: Settings
    seed: int
    prediction: Sequence[int] | None = None
    samples: int = 1
    stream: bool = False
    pieces: bool = False
    logprobs: int | None = None
    document: bool = False

    @property
    def count(self) -> int:
        """How many texts it has."""
        return len(self.prompts) * self.samples

    @property
    def watched(self) -> bool:
        """Whether its texts have to be read while they grow."""
        return self.stream or self.pieces or self.logprobs is not None


@dataclass(frozen=True)
class ScoringWork:
    """Pairs to score; `kind` is "score" or "rerank"."""

    kind: str
    pairs: Sequence[Pair]

    @property
    def count(self) -> int:
        """How many values it has."""
        return len(self.pairs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts, each of which counts once."""
        return sum(map(len, {pair.source for pair in self.pairs}))

    def batches(self, decoder: Any, batch_size: int, last: LastEncoded) -> Iterator[Part]:
        """Values batch by batch; `last` are the prompts that were encoded last for any job."""
        return decoder.scoring.parts(self.pairs, batch_size, MAX_JOINING_TOKENS, last)


@dataclass(frozen=True)
class EmbeddingWork:
    """Prompts to embed, as token ids; otherwise as `ScoringWork`."""

    ids: Sequence[Sequence[int]]
    normalize: bool
    kind: str = "embed"

    @property
    def count(self) -> int:
        """How many values it has."""
        return len(self.ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts."""
        return sum(map(len, self.ids))

    def batches(self, decoder: Any, batch_size: int, last: LastEncoded) -> Iterator[Part]:
        """Values batch by batch."""
        return decoder.embeddings.parts(self.ids, batch_size, self.normalize, MAX_JOINING_TOKENS)


@dataclass(eq=False)
class Job:
    """The work of one request.

    Attributes:
        work: one of the three kinds above.
        size: for how many texts it counts in the queue, and has in there at a time.
        put: called with every event, from the thread that owns MLX; it must not wait. An event is
            an `Update` of a text, the list of all values (scores, vectors), or the `ApiError` that
            ends the job.
        number: given by the queue, the same on every rank.
        unfinished: how many of `size` are not done.
        cancelled: whether nobody waits for it any longer, as from the thread's next round on.
        submitted: when, by the queue's clock.
        prompts: of a document, those that are no rows yet.
        whole: of a document, whether no more of them will come.
        keys: of a generation, those of the rows to be made.
        texts: of a generation, how many the rows that were made are to have.
    """

    work: Any
    size: int
    put: Callable[[Any], None]
    number: int = -1
    unfinished: int = field(init=False)
    cancelled: bool = False
    submitted: float = 0.0
    prompts: deque[Sequence[int]] = field(default_factory=deque)
    whole: bool = False
    keys: Iterator[Any] = iter(())
    texts: int = 0

    def __post_init__(self) -> None:
        self.unfinished = self.size


class JobQueue:
    """The jobs that are not done; its methods may be called from any thread.

    Attributes:
        clock: seconds.
        row_seconds: how long a text stays in a batch, on average over the last ones.
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
        self.row_seconds = 0.0
        self._ranks, self._numbers = ranks, itertools.count()
        self._changed = threading.Condition()
        self._jobs: dict[int, Job] = {}  # by number
        self._new: list[Job] = []
        self._more: list[list[Any]] = []  # prompts of jobs: number, prompts, whether they are last
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

    def add(self, job: Job) -> None:
        """Takes a job.

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
            if not self._jobs:
                self._progressed = job.submitted
            self._jobs[job.number] = job
            self._new.append(job)
            self._changed.notify()

    def extend(self, job: Job, prompts: Sequence[Sequence[int]], whole: bool) -> None:
        """Hands in more pieces of a document; `whole` says that they are the last."""
        with self._changed:
            self._more.append([job.number, prompts, whole])
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Withdraws a job, from the thread's next round on. One that is done stays done."""
        with self._changed:
            if job.number in self._jobs:
                self._withdrawn.append(job.number)
                self._changed.notify()

    def close(self, reason: str) -> None:
        """Takes no more jobs, and says why to clients; of several reasons, the first."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def unfinished(self) -> list[Job]:
        """The jobs that are not done."""
        with self._changed:
            return list(self._jobs.values())

    # ---- of the thread that owns MLX -------------------------------------------------------------

    def next_round(self, busy: bool) -> list[Job] | None:
        """Waits for jobs, unless the thread is busy, and marks those that are cancelled.

        After `REST_SECONDS` it waits no longer, so that there may be no new ones.

        Returns:
            The new jobs, the same on all ranks; None if no more will come and none is left.
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
            if job := self._jobs.get(number):
                job.prompts.extend(prompts)
                job.whole = whole
        for number in cancelled:
            if number in self._jobs:
                self._jobs[number].cancelled = True
        return None if last else new

    def _shared(self, new: list[Job], news: Any) -> tuple[list[Job], Any]:
        """What rank 0 knows, on every rank."""
        jobs = [[job.number, job.size, type(job.work).__name__, asdict(job.work)] for job in new]
        jobs, news = self._ranks.shared([jobs, news])
        if self._ranks.rank:
            # The client is on rank 0, so nobody here waits for an event.
            new = [
                Job(work_of(kind, fields), size, lambda event: None, number)
                for number, size, kind, fields in jobs
            ]
            with self._changed:
                self._jobs |= {job.number: job for job in new}
        return new, news

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
                self._jobs.pop(job.number, None)


def work_of(kind: str, fields: dict[str, Any]) -> Any:
    """Work of which kind and fields came as JSON."""
    if kind == "GenerationWork":
        return GenerationWork(**{**fields, "settings": Settings(**fields["settings"])})
    if kind == "ScoringWork":
        pairs = [Pair(tuple(p["source"]), tuple(p["target"])) for p in fields["pairs"]]
        return ScoringWork(fields["kind"], pairs)
    return EmbeddingWork(**fields)
