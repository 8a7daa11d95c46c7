"""What decoding needs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from mlx_t5.backend import mx
    from mlx_t5.network.config import T5Config
    from model import T5


class WeightsRead(NamedTuple):
    """The weights that a decoder pass reads.

    Attributes:
        layers: number of decoder layers.
        bytes: size of the decoder's weights and the output head.
        kind: the mode of quantization, such as "affine", or else the type, such as "bfloat16".
    """

    layers: int
    bytes: int
    kind: str


class Target(Protocol):
    """A model that verifies proposals: a `model.T5`, or the `exact.ExactTarget` around one.

    The methods are described in `model.T5`. A cache goes from `cache` to `decode` alone.

    Attributes:
        width: positions of each row in every pass; 0 if a pass has as many as it is given.
    """

    config: T5Config
    width: int

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array: ...
    def cache(self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1) -> Any: ...
    def decode(self, tokens: mx.array, cache: Any, offsets: list[int]) -> mx.array: ...
    def weights_read(self) -> WeightsRead: ...
    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int: ...
    def encoder_memory(self, rows: int, source: int) -> int: ...


def require_decoder(model: T5, name: str = "this model") -> None:
    """Raises `UserError` if a model has no decoder; the message begins with `name`."""
    if not model.can_decode:
        raise UserError(
            f"{name} is an encoder alone: it makes embeddings and writes no text; "
            "ask for those (--embed, embed, /v1/embeddings), or take a whole model"
        )
