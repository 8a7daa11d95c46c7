"""What goes into the thread that owns MLX and what comes out: jobs in, events out.

Requests of every kind take the same way: a `Job` with its work, through the `JobQueue`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mlx_t5.engine.batching import MAX_JOINING_TOKENS
from mlx_t5.engine.rows import Chunk
from mlx_t5.errors import is_out_of_memory
from mlx_t5.serving.errors import ApiError, internal_error, raised_at
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

    def generate(self, prompts: Any, max_tokens: int, *, batch_size: int, **settings: Any) -> Any:
        """Decodes one prompt or several."""

    def embed(self, prompts: Any) -> Any:
        """A vector of each prompt."""

    def engine(self, settings: Settings, batch_size: int) -> Any:
        """An empty batch, see `batching.Engine`."""


# ---- out -----------------------------------------------------------------------------------------


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
    """

    index: int
    chunk: Chunk
    logprobs: list[TokenLogprob]


def failure_of(error: Exception) -> ApiError:
    """Returns what clients see of an exception; logs where it came from."""
    log.error("decoding failed: %s", raised_at(error))
    if is_out_of_memory(error):
        message = "no memory left for this batch; try again later, or with a shorter prompt"
        return ApiError(503, message)
    return internal_error()


# ---- in ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationWork:
    """Prompts to decode with the same settings, with beams or without.

    Attributes:
        prompts: source tokens of each.
        settings: of all of them.
        seed: as in `SpeculativeDecoder.generate`.
        prediction: tokens that every text is expected to have; None for nothing.
        samples: texts a prompt, of rows of their own or of one row with beams.
        stream: whether updates are sent while rows grow; otherwise one a text, at its end.
        pieces: whether chunks are to say which text each token completed.
        logprobs: alternatives a token, None for no log-probabilities.
        document: whether the prompts are the pieces of one text, where one that fails ends no
            other.
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

    def batches(self, decoder: Decoder, batch_size: int, last: LastEncoded) -> Iterator[Part]:
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

    def batches(self, decoder: Decoder, batch_size: int, last: LastEncoded) -> Iterator[Part]:
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
        coming: of a generation, the rows that do not wait for a place yet.
    """

    work: Any
    size: int
    put: Callable[[Any], None]
    number: int = -1
    unfinished: int = field(init=False)
    cancelled: bool = False
    submitted: float = 0.0
    coming: Iterator[Any] = iter(())

    def __post_init__(self) -> None:
        self.unfinished = self.size
