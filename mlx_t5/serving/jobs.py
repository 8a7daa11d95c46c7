"""What goes into the thread that owns MLX and what comes out: jobs in, news or a failure out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mlx_t5.engine.rows import Chunk, Row, Stats
from mlx_t5.errors import is_out_of_memory
from mlx_t5.serving.errors import ApiError, place
from mlx_t5.serving.logprobs import TokenLogprob
from mlx_t5.settings import Settings

if TYPE_CHECKING:
    from mlx_t5.drafting.draft_model import Drafter
    from mlx_t5.engine.codec import Codec
    from mlx_t5.network.interface import Seq2Seq
    from mlx_t5.scoring.embeddings import Embeddings
    from mlx_t5.scoring.pairs import LastEncoded, Pair
    from mlx_t5.scoring.passes import Part
    from mlx_t5.scoring.scores import Scoring

log = logging.getLogger(__name__)

STATUS = {"input": 400, "memory": 503, "stopping": 503, "internal": 500}  # of `Failure.kind`


class Decoder(Protocol):
    """What serving needs of `decoder.SpeculativeDecoder`."""

    tokenizer: Any
    defaults: Settings
    codec: Codec
    exact: bool
    scoring: Scoring
    embeddings: Embeddings

    @property
    def model(self) -> Seq2Seq:
        """The target."""

    @property
    def drafter(self) -> Drafter | None:
        """Where proposals come from."""

    def target(self, batch_size: int) -> Any:
        """The model that verifies, in exact decoding with its width."""

    def generate(self, prompts: Any, max_tokens: int, *, batch_size: int) -> Any:
        """Decodes one prompt or several."""

    def embed(self, prompts: Any) -> Any:
        """A vector of each prompt."""

    def engine(self, settings: Settings, batch_size: int) -> Any:
        """An empty batch, see `batching.Engine`."""

    def beams(self, settings: Settings) -> Any:
        """An empty batch of rows that search, see `batching.Engine`."""


class QueueFull(Exception):
    """There is no room for a job; `retry_after` is in whole seconds."""

    def __init__(self, retry_after: int):
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class Stopped(Exception):
    """The thread takes no more jobs."""


class ClientGone(Exception):
    """Nobody waits for the answer any longer."""


@dataclass(frozen=True)
class Progress:
    """What one row has got.

    Attributes:
        index: of the row in its job: prompt · samples + sample.
        chunk: since the last progress; its result is there in the last one only.
        stats: a copy, as the thread goes on counting.
        logprobs: of the tokens in the chunk, if asked for; of the end token if there are none, but
            text that was held back.
    """

    index: int
    chunk: Chunk
    stats: Stats
    logprobs: list[TokenLogprob]


@dataclass(frozen=True)
class Failure:
    """The end of a job without a result.

    Attributes:
        kind: "input", "memory", "stopping" or "internal": why.
        message: for the client.
    """

    kind: str
    message: str

    @classmethod
    def from_error(cls, error: Exception) -> Failure:
        """Returns what clients are told of an exception; logs where it came from."""
        log.error("decoding failed: %s", place(error))
        if is_out_of_memory(error):
            message = "no memory left for this batch; try again later, or with a shorter prompt"
            return cls("memory", message)
        return cls("internal", "internal error; the server's log says where")


@dataclass(eq=False)
class Job:
    """One request: prompts as token ids, decoded with the same settings.

    Attributes:
        prompts: source tokens of each.
        settings: of all of them.
        seed: as in `SpeculativeDecoder.generate`.
        put: told every event, from the thread that owns MLX.
        samples: results a prompt, of rows of their own or of one search.
        stream: whether events are wanted while rows grow; otherwise one a row, at its end.
        pieces: whether chunks are to say which text each token completed.
        logprobs: alternatives a token, None for no log-probabilities.
        cancelled: whether nobody waits for it any longer.
        submitted: when, by the worker's clock.
    """

    prompts: list[list[int]]
    settings: Settings
    seed: int
    put: Callable[[Progress | Failure], None]
    samples: int = 1
    stream: bool = False
    pieces: bool = False
    logprobs: int | None = None
    cancelled: bool = False
    submitted: float = 0.0

    @property
    def size(self) -> int:
        """How many results it has."""
        return len(self.prompts) * self.samples

    @property
    def watched(self) -> bool:
        """Whether its texts have to be read while they grow."""
        return self.stream or self.pieces or self.logprobs is not None


@dataclass(eq=False)
class Flight:
    """A row on its way, for a job.

    Attributes:
        row: as the engine knows it.
        job: who asked for it.
        index: which of the job's rows it is.
        seen: tokens that the job has been told of.
        logprobs: of those that it has not.
    """

    row: Row
    job: Job
    index: int
    seen: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Values:
    """What became of a task: a value for each of its items, in their order."""

    values: list[Any]


@dataclass(frozen=True)
class Pairs:
    """What a task scores, on any rank: calling it begins the work, see `PassJob`."""

    pairs: Sequence[Pair]
    batch_size: int
    most_tokens: float

    def __call__(self, decoder: Decoder, last: LastEncoded) -> Iterator[Part]:
        """Yields after each pass."""
        return decoder.scoring.parts(self.pairs, self.batch_size, self.most_tokens, last)


@dataclass(frozen=True)
class Prompts:
    """What a task embeds; likewise."""

    ids: Sequence[Sequence[int]]
    normalize: bool
    batch_size: int
    most_tokens: float

    def __call__(self, decoder: Decoder, _: LastEncoded) -> Iterator[Part]:
        """Yields after each pass."""
        rest = self.batch_size, self.normalize, self.most_tokens
        return decoder.embeddings.parts(self.ids, *rest)


@dataclass(eq=False)
class PassJob:
    """One request.

    Attributes:
        kind: "embed", "score" or "rerank".
        parts: begins the work, given the decoder and what the worker has encoded last; yields
            after each pass. `Pairs` or `Prompts`, where several ranks do it.
        count: its items.
        tokens: of its prompts.
        size: how many texts it counts for in the queue.
        put: told the values or the failure, from the thread that owns MLX.
        cancelled: whether nobody waits for it any longer.
        submitted: when, by the worker's clock.
    """

    kind: str
    parts: Callable[[Any, LastEncoded], Iterator[Part]]
    count: int
    tokens: int
    size: int
    put: Callable[[Any], None]
    cancelled: bool = False
    submitted: float = 0.0


class Exchange:
    """One job's events, in the event loop."""

    def __init__(self, cancel: Callable[[Any], None]):
        self.job: Any  # given by whoever makes the exchange, before anything else
        self._cancel = cancel
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Progress | Values | Failure) -> None:
        """Takes an event, from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def watch(self, receive: Callable[[], Any]) -> None:
        """Withdraws the job once its client is gone; also ends when the response is complete."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.close()

    def close(self) -> None:
        """Withdraws the job, if it is not done."""
        self._cancel(self.job)
        self._events.put_nowait(None)

    async def next(self) -> Any:
        """The next event.

        Raises:
            ApiError: the job has failed.
            ClientGone: there is nobody to tell.
        """
        event = await self._events.get()
        if event is None:
            raise ClientGone
        if isinstance(event, Failure):
            raise ApiError(STATUS[event.kind], event.message)
        return event

    async def events(self, first: Progress) -> AsyncIterator[Progress]:
        """All events from `first` on, until every row is done."""
        event, left = first, self.job.size
        while True:
            left -= event.chunk.result is not None
            yield event
            if not left:
                return
            event = await self.next()

    async def finished(self) -> list[Progress]:
        """The last event of every row, in their order; for jobs that do not stream."""
        last = [event async for event in self.events(await self.next())]
        return sorted(last, key=lambda event: event.index)
