"""What goes into the thread that owns MLX and what comes out: jobs in, news or a failure out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mlx_t5.errors import is_out_of_memory
from mlx_t5.requests import Chunk, Row, Settings, Stats
from mlx_t5.serving.errors import place
from mlx_t5.serving.logprobs import TokenLogprob

if TYPE_CHECKING:
    from mlx_t5.drafting.draft_model import Drafter
    from mlx_t5.network.interface import Seq2Seq
    from mlx_t5.text.codec import Codec

log = logging.getLogger(__name__)


class Decoder(Protocol):
    """What serving needs of `decoder.SpeculativeDecoder`."""

    tokenizer: Any
    defaults: Settings
    codec: Codec

    @property
    def model(self) -> Seq2Seq:
        """The target."""

    @property
    def drafter(self) -> Drafter | None:
        """Where proposals come from."""

    def generate(self, prompts: Any, max_tokens: int) -> Any:
        """Decodes one prompt or several."""

    def engine(self, settings: Settings) -> Any:
        """An empty batch, see `batching.Engine`."""


class QueueFull(Exception):
    """There is no room for a job; `retry_after` is in whole seconds."""

    def __init__(self, retry_after: int):
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class Stopped(Exception):
    """The thread takes no more jobs."""


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
        kind: "input", "memory" or "internal": whose fault it is.
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
