"""What decoding needs of a model; `model.T5` is one."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from mlx_t5.backend import mx
from mlx_t5.checkpoints.pooling import Pooling
from mlx_t5.errors import UserError
from mlx_t5.network.cache import Cache
from mlx_t5.network.config import T5Config


class WeightsRead(NamedTuple):
    """What a decoder pass reads.

    Attributes:
        layers: of the decoder.
        bytes: of weights.
        kind: their mode of quantisation, as "affine", or else their type, as "bfloat16".
    """

    layers: int
    bytes: int
    kind: str


class Seq2Seq(Protocol):
    """An encoder, and a decoder that takes any number of new tokens; see `model.T5`."""

    config: T5Config
    dtype: Any  # what it computes in
    pooling: Pooling

    @property
    def can_decode(self) -> bool:
        """Whether there is a decoder."""

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        """The encoder's output (B, S, d_model)."""

    def cache(self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1) -> Cache:
        """A decoder's cache for encoded prompts."""

    def decode(self, tokens: mx.array, cache: Cache, offsets: list[int]) -> mx.array:
        """float32 logits (B, T, V) of the token after each of `tokens` (B, T)."""

    def weights_read(self) -> WeightsRead:
        """What a pass of `decode` reads, caches not counted."""

    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int:
        """Bytes that the cache of prompts of so many source and target positions takes."""

    def encoder_memory(self, rows: int, source: int) -> int:
        """Bytes that it takes, at most, to encode rows of so many source positions."""


def require_decoder(model: Seq2Seq, name: str = "this model") -> None:
    """Raises `UserError` if the model, which the message calls `name`, is an encoder alone."""
    if not model.can_decode:
        raise UserError(
            f"{name} is an encoder alone: it makes embeddings and writes no text; "
            "ask for those (--embed, embed, /v1/embeddings), or take a whole model"
        )
