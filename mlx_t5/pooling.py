"""From the encoder's states to one vector a text, as the folder says.

A folder of sentence-transformers says which states are pooled, and which dense layers and
normalisation there are (https://sbert.net, "Creating Custom Models"); see
checkpoints/sentence_modules.py. Any other T5 gives the mean over the tokens. Vectors are computed
in float32.

Modules change *features*, arrays by name: the encoder's states, `token_embeddings` (B, S, d_model),
and once these are pooled the vector, `sentence_embedding` (B, width).

Symbols: B rows, S source positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mlx_t5.backend import mx, nn

Step = Callable[[mx.array], mx.array]
Features = dict[str, mx.array]
Module = Callable[[Features, mx.array], None]  # the second is the mask (B, S, 1), float32
TOKENS, VECTOR = "token_embeddings", "sentence_embedding"
# By the last part of the class's name in PyTorch.
ACTIVATIONS: Mapping[str, Step] = MappingProxyType(
    {
        "Identity": lambda x: x,
        "Tanh": mx.tanh,
        "ReLU": nn.relu,
        "GELU": nn.gelu,
        "SiLU": nn.silu,
        "Sigmoid": mx.sigmoid,
    }
)


def _mean(states: mx.array, mask: mx.array) -> mx.array:
    return (states * mask).sum(axis=1) / mask.sum(axis=1)


def _mean_by_root(states: mx.array, mask: mx.array) -> mx.array:
    return (states * mask).sum(axis=1) / mx.sqrt(mask.sum(axis=1))


def _weighted_mean(states: mx.array, mask: mx.array) -> mx.array:
    return _mean(states, mask * mx.arange(1, mask.shape[1] + 1)[None, :, None])


def _largest(states: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask > 0, states, -mx.inf).max(axis=1)


def _last(states: mx.array, mask: mx.array) -> mx.array:
    index = mask.sum(axis=1, keepdims=True).astype(mx.int32) - 1
    return mx.take_along_axis(
        states, mx.broadcast_to(index, (*index.shape[:2], states.shape[2])), 1
    )[:, 0]


# By their name in a folder's configuration. Each takes states (B, S, d_model) and mask (B, S, 1),
# float32.
MODES: Mapping[str, Callable[[mx.array, mx.array], mx.array]] = MappingProxyType(
    {
        "cls": lambda states, mask: states[:, 0],
        "max": _largest,
        "mean": _mean,
        "mean_sqrt_len_tokens": _mean_by_root,
        "weightedmean": _weighted_mean,
        "lasttoken": _last,
    }
)


@dataclass(frozen=True)
class Pooled:
    """The module that makes a vector of the tokens' states.

    Attributes:
        modes: names of `MODES`; the results of several are put side by side, in this order.
    """

    modes: tuple[str, ...]

    def __call__(self, features: Features, mask: mx.array) -> None:
        """Reads `TOKENS` and writes `VECTOR`."""
        found = [MODES[mode](features[TOKENS], mask) for mode in self.modes]
        features[VECTOR] = mx.concatenate(found, axis=-1)


@dataclass(frozen=True)
class Applied:
    """A module that changes one feature, such as a dense layer.

    Attributes:
        step: what it does, whatever stands before the last dimension.
        feature: its name.
    """

    step: Step
    feature: str

    def __call__(self, features: Features, mask: mx.array) -> None:
        """Changes `feature`."""
        features[self.feature] = self.step(features[self.feature])


@dataclass(frozen=True)
class Pooling:
    """How texts become vectors.

    Attributes:
        modules: in the order in which they compute.
        truncate_dim: vectors are cut to so many numbers; None for all.
        max_tokens: a text is cut to so many tokens, its end token included; None for no limit.
        keeps_end: whether a text that is too long loses its beginning, and not its end.
        lower_case: whether texts are put in lower case.
        prompt: what is put in front of every text.
    """

    modules: tuple[Module, ...] = (Pooled(("mean",)),)
    truncate_dim: int | None = None
    max_tokens: int | None = None
    keeps_end: bool = False
    lower_case: bool = False
    prompt: str = ""

    def __call__(self, states: mx.array, mask: mx.array | None) -> mx.array:
        """Vectors (B, width), float32, of encoded texts (B, S, d_model) with their mask (B, S)."""
        features = {TOKENS: states.astype(mx.float32)}
        weights = mx.ones(states.shape[:2]) if mask is None else mask.astype(mx.float32)
        for module in self.modules:
            module(features, weights[..., None])
        return features[VECTOR][:, : self.truncate_dim]

    def width(self, d_model: int) -> int:
        """Numbers in a vector; nothing is computed for that."""
        return self(mx.zeros((1, 1, d_model)), None).shape[1]

    def read(self, text: str) -> str:
        """A text as the model is to see it."""
        text = self.prompt + text
        # Letter by letter, as tokenizers do it: `lower` writes a sigma that ends a word otherwise.
        return "".join(map(str.lower, text)) if self.lower_case else text

    def cut(self, ids: list[int]) -> list[int]:
        """A text's tokens, at most `max_tokens`, of which the end token stays the last."""
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return ids
        first = 0 if self.keeps_end else self.max_tokens - 1
        return ids[:first] + ids[first - self.max_tokens :]


def normalized(vectors: mx.array) -> mx.array:
    """Vectors (…, width) of length 1; those of length 0 stay as they are."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
