"""What decoding needs of a model; `model.T5` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from model import T5


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


def require_decoder(model: T5, name: str = "this model") -> None:
    """Raises `UserError` if the model, which the message calls `name`, is an encoder alone."""
    if not model.can_decode:
        raise UserError(
            f"{name} is an encoder alone: it makes embeddings and writes no text; "
            "ask for those (--embed, embed, /v1/embeddings), or take a whole model"
        )
