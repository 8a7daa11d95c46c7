"""A larger T5 that computes the same function as a small one: what each of its tensors holds.

Everything that is added is random and dense, so that it costs what trained weights cost, except
where it would reach the output:

- d_model, d -> D: nothing writes into the new dimensions of the residual (rows of `o` and `wo`,
  columns of the embedding are zero). RMSNorm divides by the root of mean(x^2) + epsilon; with the
  mean over D, both become d/D of what they were if epsilon' = epsilon * d/D, and norm weights times
  sqrt(d/D) undo the rest. The factor D^-0.5 in front of a tied head is d^-0.5 times that same
  sqrt(d/D), so the decoder's last norm then keeps its weights.
- heads, d_ff, layers: the columns of `o` and `wo` that read what is new are zero.
- d_kv: T5 does not scale scores, so zero rows of `q` are enough; columns of `o` as before.
- vocabulary: no row of a tied head may be zero, as a logit of 0 could win. Two dimensions of the
  residual, c and c in every token's embedding, stay so through all layers. They add 2c^2 to the sum
  of squares, and epsilon' * D is made smaller by just that: the norms are the same as before. Of
  all norms only the decoder's last passes them on, as z and -z. Old tokens get c*z - c*z = 0 from
  them, new ones, whose embedding has -E and 0 there, -E*z: far below all others.

Symbols: d and D are d_model of the source and of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config

SIZES = (
    "vocab_size", "d_model", "d_ff", "num_heads", "d_kv", "num_layers", "num_decoder_layers",
)  # fmt: skip
# Rows and columns of each kind of tensor; bias tables are not named after theirs.
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
# Logits of new tokens are -_DEPTH divided by the root mean square of the decoder's residual, which
# in the bundled pair is 2 to 8. All these are powers of two, or made such: exact in every type.
_DEPTH = 2.0**15
_AWAY = 2.0**12  # E above; neither it nor the norm's weight leaves the range of float16


@dataclass(frozen=True)
class Patch:
    """A rectangle of a matrix that holds one value."""

    rows: slice
    columns: slice
    value: float


@dataclass(frozen=True)
class Widened:
    """One tensor of the larger model.

    Attributes:
        shape: its shape; a vector counts as a matrix of one column.
        centre: mean of its uniform random numbers.
        spread: the furthest they lie from it.
        patches: what is not random.
        rows: where the source's rows go, if there is a source.
        columns: where the source's columns go.
        factor: what the source's numbers are multiplied by.
    """

    shape: tuple[int, ...]
    centre: float
    spread: float
    patches: tuple[Patch, ...] = ()
    rows: np.ndarray = field(default_factory=lambda: np.arange(0))
    columns: np.ndarray = field(default_factory=lambda: np.arange(0))
    factor: float = 1.0

    def chunks(
        self, source: np.ndarray | None, rng: np.random.Generator, max_bytes: int
    ) -> Iterator[np.ndarray]:
        """Yields the tensor in float32 as chunks of whole rows, the same in chunks of any size.

        Args:
            source: the tensor of the small model, float32; None if it has none.
            rng: gives the random numbers.
            max_bytes: about the most a chunk takes.
        """
        rows, columns = (*self.shape, 1)[:2]
        step = max(1, max_bytes // (4 * columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = self._random(rng, stop - start, columns)
            for patch in self.patches:
                inside = slice(max(0, patch.rows.start - start), max(0, patch.rows.stop - start))
                chunk[inside, patch.columns] = patch.value
            here = (self.rows >= start) & (self.rows < stop)
            if source is not None and here.any():
                values = source.reshape(len(source), -1)[here] * np.float32(self.factor)
                chunk[np.ix_(self.rows[here] - start, self.columns)] = values
            yield chunk.reshape(-1, *self.shape[1:])

    def _random(self, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
        if not self.spread:
            return np.full((rows, columns), self.centre, np.float32)
        chunk = rng.random((rows, columns), dtype=np.float32)
        chunk *= 2 * self.spread
        chunk += self.centre - self.spread
        return chunk


class Widening:
    """How a model of one shape becomes one of another.

    Args:
        source: the small model's configuration.
        sizes: the large one's, by the names in `SIZES`.

    Attributes:
        source: the small model's configuration.
        result: the large one's.

    Raises:
        UserError: a size is less than the source's, or d_model leaves no room for what keeps new
            tokens of a larger vocabulary from being chosen.
    """

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
        """What a tensor holds.

        Args:
            name: as in MLX folders.
            shape: in the large model.
            has_source: whether the small model has this tensor, not only the large one.
        """
        part = name.split(".")[-2]
        centre, spread = self._randomness(part)
        tensor = Widened(shape, centre, spread, self._patches(name, part, has_source))
        if not has_source:
            return tensor
        rows, columns = (self._indices(axis) for axis in _AXES.get(part, ("buckets", "num_heads")))
        factor = self._norm_factor(name) if part == "norm" else 1.0
        return replace(tensor, rows=rows, columns=columns, factor=factor)

    def _indices(self, axis: str) -> np.ndarray:
        """Where along an axis of the large model the small one's entries lie."""
        fixed = {"buckets": self.source.relative_attention_num_buckets, "one": 1}
        if axis != "inner":
            return np.arange(fixed.get(axis) or getattr(self.source, axis))
        heads = np.arange(self.source.num_heads)[:, None] * self.result.d_kv
        return (heads + np.arange(self.source.d_kv)).ravel()

    def _randomness(self, part: str) -> tuple[float, float]:
        """Centre and spread of new numbers: of the size they have before training."""
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
        """What must not be random for the function to stay the same."""
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
        """The decoder's last norm's weight of the constant dimensions, a power of two."""
        d = self.source.d_model
        head = d**-0.5 if self.source.scales_logits else math.sqrt(self.result.d_model / d)
        return 2.0 ** math.ceil(math.log2(_DEPTH / (_AWAY * self._constant * head)))


def _constant(source: T5Config, d_model: int) -> float:
    """c above: the largest power of two that leaves half of epsilon or more."""
    if d_model < source.d_model + 2:
        least = f"at least {source.d_model + 2}"
        raise UserError(f"a larger vocab_size needs a d_model of {least}, not {d_model}")
    squares = source.layer_norm_epsilon * source.d_model
    if not squares:
        raise UserError("a larger vocab_size needs a source whose layer_norm_epsilon is not 0")
    return 2.0 ** math.floor(math.log2(squares / 4) / 2)
