"""Facts about a model for decoding: whether it has a decoder, and which weights a pass reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mlx_t5.errors import UserError

if TYPE_CHECKING:
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


def require_decoder(model: T5, name: str = "this model") -> None:
    """Raises `UserError` if a model has no decoder; the message begins with `name`."""
    if not model.can_decode:
        raise UserError(
            f"{name} is an encoder alone: it makes embeddings and writes no text; "
            "ask for those (--embed, embed, /v1/embeddings), or take a whole model"
        )
