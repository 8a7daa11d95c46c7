"""One model over several ranks: which part of each weight a rank has, and how it is read.

Tensor parallelism as in Megatron-LM (https://arxiv.org/abs/1909.08053, section 3). Attention is cut
by heads: q, k and v by their outputs, o by its inputs, and the relative bias by its columns. The
feed-forward is cut by hidden units: wi by outputs, wo by inputs. What o and wo give is a part of a
sum, so each half of a block ends with one sum over the ranks. The output head is cut by tokens. The
embedding, which every rank needs whole, and the norms are with all of them.

Symbols: n ranks, M rows, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config
from mlx_t5.network.linear import Linear, product
from mlx_t5.network.memory import HEADS, head_bytes, room_for_weights
from mlx_t5.network.ranks import ALONE, Ranks
from mlx_t5.network.weights import check, fill, quantize, read_config

# By the end of a parameter's name, the dimension that it is cut along.
_CUTS = (
    (re.compile(r"\.(q|k|v|wi|wi_0|wi_1)\.\w+$"), 0),
    (re.compile(r"\.(o|wo)\.\w+$|\.relative_attention_bias\.\d+\.weight$"), 1),
    (re.compile(r"^lm_head\.\w+$"), 0),
)


def part_of(config: T5Config, ranks: Ranks) -> T5Config:
    """The shape of what one rank computes: its heads and its hidden units."""
    if ranks.size == 1:
        return config
    heads, hidden = config.num_heads // ranks.size, config.d_ff // ranks.size
    return replace(config, num_heads=heads, d_ff=hidden)


def require_divisible(config: T5Config, ranks: Ranks, groups: Iterable[int] = ()) -> None:
    """Checks that a model can be cut into as many parts as there are ranks.

    Args:
        config: of the whole model.
        ranks: that share it.
        groups: of quantised weights that are cut by their inputs: how many groups a row has.

    Raises:
        UserError: it cannot; the message has the numbers of ranks that would do.
    """
    counts = {config.num_heads: "heads", config.d_ff: "hidden units"}
    counts |= {n: "groups of quantised inputs" for n in groups if n not in counts}
    whole = math.gcd(*counts)
    if whole % ranks.size == 0:
        return
    fitting = [n for n in range(1, min(whole, 64) + 1) if whole % n == 0]
    what = " and ".join(f"{n} {name}" for n, name in counts.items() if n % ranks.size)
    numbers = ", ".join(map(str, fitting[:-1])) + (" or " if fitting[1:] else "") + str(fitting[-1])
    raise UserError(
        f"{ranks.size} ranks cannot share this model: {what} do not divide by {ranks.size}; "
        f"take {numbers}"
    )


@dataclass(frozen=True)
class Sharding:
    """Reads a rank's part of a checkpoint.

    Attributes:
        ranks: that share the model.
        stored: all tensors.
        merged: whether tensors are changed while they are read, so that they are read whole.
    """

    ranks: Ranks
    stored: Checkpoint
    merged: bool = False

    def read(self, theirs: str, ours: str) -> mx.array:
        """This rank's part of a tensor in its stored type, and nothing else of it.

        Args:
            theirs: its name in the checkpoint.
            ours: the parameter's.
        """
        shape = self.stored.shape(theirs)
        where = None if self.merged else self._where(ours, shape)
        return self.stored.part(theirs, *(where or (0, slice(0, shape[0]))))

    def tensors(self) -> Iterator[tuple[str, mx.array]]:
        """`read` for all tensors of an MLX folder, whose names are ours."""
        return ((name, self.read(name, name)) for name in self.names)

    @property
    def names(self) -> list[str]:
        """All names, of several ranks in the order to read: the largest first.

        A tensor is there twice for a moment, and then while little else is.
        """
        names = self.stored.names
        return (
            names if self.ranks.size == 1 else sorted(names, key=lambda n: -self.stored.nbytes(n))
        )

    def cut(self, ours: str, array: mx.array) -> mx.array:
        """This rank's part of what `read` gave, if that was read whole."""
        where = self._where(ours, array.shape)
        if where is None or not self.merged:
            return array
        axis, part = where
        return mx.contiguous(array[part] if axis == 0 else array[:, part])

    def groups(self) -> set[int]:
        """How many groups a row has of each quantised weight that is cut by its inputs."""
        scales = [name for name in self.stored.names if name.endswith(".scales")]
        return {self.stored.shape(name)[1] for name in scales if _axis(name) == 1}

    def _where(self, ours: str, shape: tuple[int, ...]) -> tuple[int, slice] | None:
        axis = _axis(ours)
        if axis is None or self.ranks.size == 1:
            return None
        return axis, self.ranks.share(shape[axis])


def _axis(name: str) -> int | None:
    return next((axis for pattern, axis in _CUTS if pattern.search(name)), None)


def head_part(embedding: Any, x: mx.array, ranks: Ranks) -> mx.array:
    """Logits (M, its share of V) of this rank by x (M, d_model), where the head is the embedding.

    Args:
        embedding: the whole of it, quantised or not; its rows are not copied.
        x: of the decoder.
        ranks: that share the vocabulary.
    """
    own = ranks.share(len(embedding.weight))
    if "scales" not in embedding:
        return product(x, embedding.weight[own])
    how = {name: getattr(embedding, name) for name in ("group_size", "bits", "mode")}
    biases = embedding.biases[own] if "biases" in embedding else None
    return mx.quantized_matmul(x, embedding.weight[own], embedding.scales[own], biases, **how)


def whole_head(model: Any) -> nn.Module:
    """The output head of a model of which this rank has a part, whole; nobody else is asked.

    It is read from the model's folder, quantised as it is there. No adapter changes it.

    Args:
        model: a `model.T5` that `model.load` has read, with a head that is not the embedding.

    Raises:
        UserError: the folder cannot be read any longer.
        RuntimeError: the device has not enough memory.
    """
    own, config = nn.Module(), model.config
    own.lm_head = Linear(config.d_model, config.vocab_size)
    with (
        room_for_weights(head_bytes(model.folder, model.dtype)),
        open_checkpoint(model.folder) as stored,
    ):
        names = [name for name in stored.names if name.startswith(HEADS)]
        if len(names) > 1:
            quantize(own, read_config(model.folder).get("quantization"), set(names))
        expected = {name: array.shape for name, array in tree_flatten(own.parameters())}
        check({name: stored.shape(name) for name in names}, expected)
        part = Sharding(ALONE, stored)  # all of it
        fill(own, ((name, part.read(name, name)) for name in names), model.dtype)
    return own.lm_head
