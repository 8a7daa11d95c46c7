"""How a rank reads its part of a checkpoint, and nothing else of it; sharding.py says which it is.

Symbols: n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mlx_t5.errors import UserError
from mlx_t5.network import memory
from mlx_t5.network.config import T5Config
from mlx_t5.network.linear import Linear
from mlx_t5.network.ranks import Ranks, ranks_of
from mlx_t5.network.sharding import axis_of, cut, shard, where_of
from mlx_t5.network.weights import check, fill, quantize, read_config, read_mlx


class Part:
    """A rank's part of a checkpoint; of a process alone, all of it.

    Attributes:
        stored: all tensors.
    """

    def __init__(self, stored: Checkpoint, group: Any = None, merged: bool = False) -> None:
        """Opens a checkpoint for the processes of a group.

        Args:
            stored: the checkpoint.
            group: of `mx.distributed`; None is this process alone.
            merged: whether tensors are changed while they are read, so that they are read whole.
        """
        self.stored, self._ranks, self._merged = stored, Ranks(group), merged

    def of(self, model: Any) -> Any:
        """`shard` for these ranks."""
        return shard(model, self._ranks)

    def loaded_bytes(self, dtype: str | mx.Dtype | None) -> int:
        """About how many bytes its weights take."""
        return memory.loaded_bytes(self.stored, dtype) // self._ranks.size

    def read(self, theirs: str, ours: str) -> mx.array:
        """This rank's part of a tensor in its stored type, and nothing else of it.

        Args:
            theirs: its name in the checkpoint.
            ours: the parameter's.
        """
        shape = self.stored.shape(theirs)
        where = None if self._merged else where_of(ours, shape, self._ranks)
        return self.stored.part(theirs, *(where or (0, slice(0, shape[0]))))

    def tensors(self, folder: Path) -> Iterator[tuple[str, mx.array]]:
        """`read` for all tensors of an MLX folder, whose names are ours."""
        if self._ranks.size == 1:
            return read_mlx(folder)
        return ((name, self.read(name, name)) for name in self.names)

    @property
    def names(self) -> list[str]:
        """All names, of several ranks in the order to read: the largest first.

        A tensor is there twice for a moment, and then while little else is.
        """
        names = self.stored.names
        if self._ranks.size == 1:
            return names
        return sorted(names, key=lambda name: -self.stored.nbytes(name))

    def cut(self, ours: str, array: mx.array) -> mx.array:
        """This rank's part of what `read` gave, if that was read whole."""
        return cut(ours, array, self._ranks) if self._merged else array

    def require_divisible(self, config: T5Config) -> None:
        """Raises `UserError` unless the model can be cut into so many parts."""
        scales = [name for name in self.stored.names if name.endswith(".scales")]
        groups = {self.stored.shape(name)[1] for name in scales if axis_of(name) == 1}
        require_divisible(config, self._ranks, groups)


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


def whole_head(model: Any) -> nn.Module | None:
    """The output head of all tokens; None if it is the embedding. Nobody else is asked.

    If ranks share it, it is read from the model's folder, quantised as it is there. No adapter
    changes it.

    Args:
        model: a `model.T5`; one that is shared, as `model.load` has read it.

    Raises:
        UserError: the folder cannot be read any longer.
        RuntimeError: the device has not enough memory.
    """
    if "lm_head" not in model or ranks_of(model).size == 1:
        return getattr(model, "lm_head", None)
    own, config = nn.Module(), model.config
    own.lm_head = Linear(config.d_model, config.vocab_size)
    with (
        memory.room_for_weights(memory.head_bytes(model.folder, model.dtype)),
        open_checkpoint(model.folder) as stored,
    ):
        names = [name for name in stored.names if name.startswith(memory.HEADS)]
        if len(names) > 1:
            quantize(own, read_config(model.folder).get("quantization"), set(names))
        expected = {name: array.shape for name, array in tree_flatten(own.parameters())}
        check({name: stored.shape(name) for name in names}, expected)
        part = Part(stored)  # all of it
        fill(own, ((name, part.read(name, name)) for name in names), model.dtype)
    return own.lm_head
