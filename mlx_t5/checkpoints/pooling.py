"""Pools the encoder's states to one vector per text.

A model folder of sentence-transformers describes its pooling (https://sbert.net, "Creating Custom
Models"); sentence_modules.py reads the description. For any other T5 a text's vector is the mean of
its tokens' states. Vectors are computed in float32.

Shapes: states (texts, tokens, d_model), mask (texts, tokens), vectors (texts, width).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_t5.backend import mx

Step = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Pooling:
    """Turns the encoder's states into one vector per text.

    Attributes:
        mode: "mean" (the mean of all tokens' states), "cls" (the first state) or "lasttoken" (the
            last state).
        steps: functions applied one after the other to the pooled vectors, such as dense layers.
        max_tokens: the number of tokens to which a text is cut, including the end token; None for
            no limit.
        prompt: the prefix of every text.
    """

    mode: str = "mean"
    steps: tuple[Step, ...] = ()
    max_tokens: int | None = None
    prompt: str = ""

    def __call__(self, states: mx.array, mask: mx.array | None) -> mx.array:
        """Returns vectors (texts, width), given states (texts, tokens, d_model) and their mask."""
        vectors = self._pooled(states.astype(mx.float32), mask)
        for step in self.steps:
            vectors = step(vectors)
        return vectors

    def width(self, d_model: int) -> int:
        """Returns the number of values in a vector; computes no vector."""
        return self(mx.zeros((1, 1, d_model)), None).shape[1]

    def cut(self, ids: list[int]) -> list[int]:
        """Returns a text's token ids, cut to `max_tokens`; the end token stays at the end."""
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return ids
        return [*ids[: self.max_tokens - 1], ids[-1]]

    def _pooled(self, states: mx.array, mask: mx.array | None) -> mx.array:
        if self.mode == "cls":
            return states[:, 0]
        weights = mx.ones(states.shape[:2]) if mask is None else mask.astype(mx.float32)
        lengths = weights.sum(axis=1)
        if self.mode == "lasttoken":
            return states[mx.arange(len(states)), lengths.astype(mx.int32) - 1]
        return (states * weights[..., None]).sum(axis=1) / lengths[:, None]


def normalized(vectors: mx.array) -> mx.array:
    """Returns vectors (…, width) scaled to length 1; vectors of length 0 stay unchanged."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
