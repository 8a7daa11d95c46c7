"""What decoding needs of a model; `model.T5` is one."""

from __future__ import annotations

from typing import Any, Protocol

from mlx_t5.backend import mx
from mlx_t5.network.cache import Cache
from mlx_t5.network.config import T5Config


class Seq2Seq(Protocol):
    """An encoder, and a decoder that takes any number of new tokens; see `model.T5`."""

    config: T5Config
    dtype: Any  # what it computes in

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        """The encoder's output (B, S, d_model)."""

    def cache(self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1) -> Cache:
        """A decoder's cache for encoded prompts."""

    def decode(
        self,
        tokens: mx.array,
        cache: Cache,
        offsets: list[int] | mx.array,
        traced: bool = False,
    ) -> mx.array:
        """float32 logits (B, T, V) of the token after each of `tokens` (B, T)."""

    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int:
        """Bytes that the cache of prompts of so many source and target positions takes."""

    def encoder_memory(self, rows: int, source: int) -> int:
        """Bytes that it takes, at most, to encode rows of so many source positions."""
