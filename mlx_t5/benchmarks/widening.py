"""Computes the tensors of a larger T5 that computes the same function as a small one.

The added numbers are random rather than zero, so that they cost as much time as trained weights.
Where random numbers would change the output, the added numbers are fixed. Below, d and epsilon are
the small T5's d_model and layer_norm_epsilon; D and epsilon' are the larger T5's.

- d_model: the new columns of the embedding and the new rows of the output projections `o` and `wo`
  are zero, so the new dimensions of the residual are zero. RMSNorm divides by the root of
  mean(x^2) + epsilon. The new zeros make the mean smaller by the factor d/D. epsilon' is
  epsilon * d/D, so the whole sum under the root is smaller by this factor. To compensate, norm
  weights are multiplied by sqrt(d/D). With a tied head, the decoder's last norm keeps its weights.
  There T5 multiplies the norm's output by D^-0.5, not d^-0.5, and D^-0.5 = d^-0.5 * sqrt(d/D).
- heads, d_ff, layers: `o` and `wo` have zero columns for new heads and new feed-forward units. In
  new layers, `o` and `wo` are zero altogether.
- d_kv: T5 does not divide scores by sqrt(d_kv), so scores stay the same if the new rows of `q` are
  zero. The new columns of `o` are zero as well.
- vocabulary: a new token must never be chosen, so its logit must be far below the others. Two of
  the new dimensions of the residual serve this purpose. The embedding of every old token has a
  constant c in both dimensions. (New tokens are never in the input.) No layer changes the two
  constants. No layer reads them, because every norm except the decoder's last norm has weight 0
  there. The decoder's last norm turns (c, c) into (z, -z), with z > 0. In the head, an old token's
  row has (c, c) there, which adds c*z - c*z = 0 to the logit. A new token's row has (-E, 0), with a
  large constant E, which adds -E*z. In every norm, (c, c) adds 2c^2 to the sum of squares. To
  compensate, epsilon' is (epsilon * d - 2c^2) / D instead of epsilon * d/D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_t5.checkpoints.config import T5Config
from mlx_t5.errors import UserError

SIZES = (
    "vocab_size", "d_model", "d_ff", "num_heads", "d_kv", "num_layers", "num_decoder_layers",
)  # fmt: skip
# The sizes that give the rows and columns of each kind of tensor; bias tables are not listed.
_AXES = {
    "shared": ("vocab_size", "d_model"),
    "lm_head": ("vocab_size", "d_model"),
    "norm": ("d_model", "one"),
    "q": ("inner", "d_model"),
    "k": ("inner", "d_model"),
    "v": ("inner", "d_model"),
    "o": ("d_model", "inner"),
    "wi": ("d_ff", "d_model"),
    "wi_0": ("d_ff", "d_model"),
    "wi_1": ("d_ff", "d_model"),
    "wo": ("d_model", "d_ff"),
}
# A new token's logit is at most -_DEPTH divided by the root mean square of the decoder's residual,
# which is 2 to 8 in the bundled pair. All numbers used here are powers of two, which are exact in
# every type.
_DEPTH = 2.0**15
_AWAY = 2.0**12  # E above; E and the norm's weight are in the range of float16


@dataclass(frozen=True)
class Patch:
    rows: slice
    columns: slice
    value: float


@dataclass(frozen=True)
class Widened:
    """One tensor of the larger model.

    Attributes:
        shape: the tensor's shape; a vector counts as a matrix of one column.
        center, spread: mean and range of the uniform random numbers.
        patches: the rectangles that are not random.
        rows, columns: where the small model's rows and columns are copied to.
        factor: the factor by which the copied numbers are multiplied.
    """

    shape: tuple[int, ...]
    center: float
    spread: float
    patches: tuple[Patch, ...] = ()
    rows: np.ndarray = field(default_factory=lambda: np.arange(0))
    columns: np.ndarray = field(default_factory=lambda: np.arange(0))
    factor: float = 1.0

    def array(self, source: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        rows, columns = (*self.shape, 1)[:2]
        if self.spread:
            array = rng.random((rows, columns), dtype=np.float32)
            array *= 2 * self.spread
            array += self.center - self.spread
        else:
            array = np.full((rows, columns), self.center, np.float32)
        for patch in self.patches:
            array[patch.rows, patch.columns] = patch.value
        if source is not None:
            small = source.reshape(len(source), -1)
            array[np.ix_(self.rows, self.columns)] = small * np.float32(self.factor)
        return array.reshape(self.shape)


class Widening:
    """The change from a small model to a larger model that computes the same function."""

    def __init__(self, source: T5Config, sizes: Mapping[str, int]):
        for name in SIZES:
            if sizes[name] < getattr(source, name):
                least = f"the source's {getattr(source, name)}"
                raise UserError(f"{name} {sizes[name]} is less than {least}; models only grow")
        self.source = source
        self._constant = 0.0
        if sizes["vocab_size"] > source.vocab_size:
            self._constant = _constant(source, sizes["d_model"])
        epsilon = source.layer_norm_epsilon * (source.d_model / sizes["d_model"])
        epsilon -= 2 * self._constant**2 / sizes["d_model"]
        changes: dict[str, Any] = {**sizes, "layer_norm_epsilon": epsilon}
        self.result = replace(source, **changes)

    def tensor(self, name: str, shape: tuple[int, ...], has_source: bool) -> Widened:
        part = name.split(".")[-2]
        center, spread = self._randomness(part)
        tensor = Widened(shape, center, spread, self._patches(name, part, has_source))
        if not has_source:
            return tensor
        rows, columns = (self._indices(axis) for axis in _AXES.get(part, ("buckets", "num_heads")))
        factor = self._norm_factor(name) if part == "norm" else 1.0
        return replace(tensor, rows=rows, columns=columns, factor=factor)

    def _indices(self, axis: str) -> np.ndarray:
        fixed = {"buckets": self.source.relative_attention_num_buckets, "one": 1}
        if axis != "inner":
            return np.arange(fixed.get(axis) or getattr(self.source, axis))
        heads = np.arange(self.source.num_heads)[:, None] * self.result.d_kv
        return (heads + np.arange(self.source.d_kv)).ravel()

    def _randomness(self, part: str) -> tuple[float, float]:
        if part == "norm":
            return 1.0, 0.5
        deviation = {
            "q": (self.result.d_model * self.result.d_kv) ** -0.5,
            "o": 0.0,
            "wo": 0.0,
            "shared": 1.0,
        }.get(part, 1.0 if part.isdigit() else self.result.d_model**-0.5)
        return 0.0, deviation * math.sqrt(3)

    def _norm_factor(self, name: str) -> float:
        if name == "decoder.norm.weight" and self.source.scales_logits:
            return 1.0
        return math.sqrt(self.source.d_model / self.result.d_model)

    def _patches(self, name: str, part: str, has_source: bool) -> tuple[Patch, ...]:
        old, new, d = self.source, self.result, self.source.d_model
        everything = slice(0, None)
        if part == "q" and has_source:
            starts = [head * new.d_kv for head in range(old.num_heads)]
            return tuple(
                Patch(slice(at + old.d_kv, at + new.d_kv), everything, 0.0) for at in starts
            )
        if part in ("shared", "lm_head"):
            tokens = slice(0, old.vocab_size), slice(old.vocab_size, new.vocab_size)
            patches = [Patch(slice(0, new.vocab_size), slice(d, None), 0.0)]
            if self._constant:
                patches.append(Patch(tokens[0], slice(d, d + 2), self._constant))
                patches.append(Patch(tokens[1], slice(d, d + 1), -_AWAY))
            return tuple(patches)
        if part == "norm" and self._constant:
            weight = self._last_weight() if name == "decoder.norm.weight" else 0.0
            return (
                Patch(slice(d, d + 1), everything, weight),
                Patch(slice(d + 1, d + 2), everything, -weight),
            )
        return ()

    def _last_weight(self) -> float:
        d = self.source.d_model
        head = d**-0.5 if self.source.scales_logits else math.sqrt(self.result.d_model / d)
        return 2.0 ** math.ceil(math.log2(_DEPTH / (_AWAY * self._constant * head)))


def _constant(source: T5Config, d_model: int) -> float:
    """c, the largest power of two for which 4c^2 <= epsilon * d, so that epsilon' is positive."""
    if d_model < source.d_model + 2:
        least = f"at least {source.d_model + 2}"
        raise UserError(f"a larger vocab_size needs a d_model of {least}, not {d_model}")
    squares = source.layer_norm_epsilon * source.d_model
    if not squares:
        raise UserError("a larger vocab_size needs a source whose layer_norm_epsilon is not 0")
    return 2.0 ** math.floor(math.log2(squares / 4) / 2)
