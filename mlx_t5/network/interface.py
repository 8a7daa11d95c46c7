"""What decoding needs of a model."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config


class WeightsRead(NamedTuple):
    """The weights that a decoder pass reads: the decoder's and the output head."""

    layers: int
    bytes: int
    kind: str  # the mode of quantization, such as "affine", or else the type, such as "bfloat16"


class Target(Protocol):
    """A model that verifies proposals: a `model.T5`, or the `exact.ExactTarget` around one.

    `width` is the number of positions that every pass has per row; 0 if it is not fixed.
    """

    config: T5Config
    width: int

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array: ...
    def cache(self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1) -> Any: ...
    def decode(self, tokens: mx.array, cache: Any, offsets: list[int]) -> mx.array: ...
    def weights_read(self) -> WeightsRead: ...
    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int: ...
    def encoder_memory(self, rows: int, source: int) -> int: ...
