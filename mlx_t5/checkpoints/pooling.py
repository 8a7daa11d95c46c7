"""Pools the encoder's states to one vector a text.

A folder of sentence-transformers describes how (https://sbert.net, "Creating Custom Models"); see
sentence_modules.py. Any other T5 takes the mean over the tokens. Vectors are computed in float32.

Symbols: B rows, S source positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_t5.backend import mx

Step = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Pooling:
    """How texts become vectors.

    Attributes:
        mode: "mean" of the tokens' states, "cls" (the first state) or "lasttoken".
        steps: functions applied to the vectors then, such as dense layers.
        max_tokens: a text is cut to so many tokens, its end token included; None for no limit.
        prompt: prefix of every text.
    """

    mode: str = "mean"
    steps: tuple[Step, ...] = ()
    max_tokens: int | None = None
    prompt: str = ""

    def __call__(self, states: mx.array, mask: mx.array | None) -> mx.array:
        """Returns float32 vectors (B, width) of states (B, S, d_model) with their mask (B, S)."""
        vectors = self._pooled(states.astype(mx.float32), mask)
        for step in self.steps:
            vectors = step(vectors)
        return vectors

    def width(self, d_model: int) -> int:
        """Returns the size of a vector, without computing one."""
        return self(mx.zeros((1, 1, d_model)), None).shape[1]

    def cut(self, ids: list[int]) -> list[int]:
        """Cuts a text's tokens to `max_tokens`; the end token stays the last."""
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
    """Scales vectors (…, width) to length 1; those of length 0 stay as they are."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
