"""Cuts one model into shards for several ranks (tensor parallelism).

As in Megatron-LM (https://arxiv.org/abs/1909.08053, section 3), attention is cut by heads: the
weights q, k and v by their outputs, o by its inputs, and the relative bias by its columns. The
feed-forward is cut by hidden units: wi by outputs, wo by inputs. The ranks' products with o and wo
are terms of a sum, so attention and feed-forward each end with one sum over the ranks. The output
head is cut by tokens. Every rank has the whole embedding and all norms.

The model's code does not know about ranks. Where the ranks' products have to be combined, `shard`
gives the layer a function `total`, which adds the products or, for the head, concatenates their
columns. `linear.Matrix.times` calls this function after the product.

Symbols: n ranks, M rows, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from mlx_t5.backend import mx, tree_flatten, tree_unflatten
from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config
from mlx_t5.network.ranks import Ranks

if TYPE_CHECKING:
    from model import T5

# Pattern of a parameter's name, and the axis that it is cut along.
_CUTS = (
    (re.compile(r"\.(q|k|v|wi|wi_0|wi_1)\.\w+$"), 0),
    (re.compile(r"\.(o|wo)\.\w+$|\.relative_attention_bias\.\d+\.weight$"), 1),
    (re.compile(r"^lm_head\.\w+$"), 0),
)


def shard(model: T5, ranks: Ranks) -> None:
    """Turns a model into this rank's shard; its weights have to be loaded afterwards.

    Raises:
        UserError: the model cannot be cut for this number of ranks; see `require_divisible`.
    """
    config, n = model.config, ranks.size
    parameters = dict(tree_flatten(model.parameters()))
    require_divisible(config, ranks, {name: array.shape for name, array in parameters.items()})
    model.ranks, model.passes = ranks, -math.inf  # never compiled, as the CPU computes the sums
    model.local_config = replace(config, num_heads=config.num_heads // n, d_ff=config.d_ff // n)
    for layer in chain(*(stack.layers for stack in model.stacks)):
        for attention in (layer[name] for name in layer if name.endswith("_attention")):
            attention.o.total = ranks.sum
        layer.feed_forward.wo.total = ranks.sum
    head = model["lm_head" if "lm_head" in model else "shared"]
    head.total = partial(ranks.columns, count=config.vocab_size)
    if "lm_head" not in model:  # every rank multiplies with its rows of the whole embedding
        head.rows = ranks.share(config.vocab_size)
    shards = [(name, cut(name, array, ranks)) for name, array in parameters.items()]
    model.update(tree_unflatten(shards))


def require_divisible(
    config: T5Config, ranks: Ranks, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> None:
    """Checks that a model can be cut into one shard per rank.

    Args:
        config: the whole model's config.
        ranks: the ranks that share it.
        shapes: shapes of its tensors by name. They matter for quantized weights that are cut by
            their inputs: such a weight can only be cut between two quantization groups.

    Raises:
        UserError: the model cannot be cut; the message names numbers of ranks that work.
    """
    counts = {config.num_heads: "heads", config.d_ff: "hidden units"}
    for name, shape in shapes.items():
        if name.endswith(".scales") and axis_of(name) == 1:
            counts.setdefault(shape[1], "groups of quantized inputs")
    common = math.gcd(*counts)
    if common % ranks.size == 0:
        return
    fitting = [n for n in range(1, min(common, 64) + 1) if common % n == 0]
    what = " and ".join(f"{n} {name}" for n, name in counts.items() if n % ranks.size)
    numbers = ", ".join(map(str, fitting[:-1])) + (" or " if fitting[1:] else "") + str(fitting[-1])
    raise UserError(
        f"{ranks.size} ranks cannot share this model: {what} do not divide by {ranks.size}; "
        f"take {numbers}"
    )


def cut(name: str, array: mx.array, ranks: Ranks) -> mx.array:
    """Returns this rank's shard of a parameter: a copy, or `array` itself if it is not cut."""
    where = where_of(name, array.shape, ranks)
    if where is None:
        return array
    axis, mine = where
    return mx.contiguous(array[mine] if axis == 0 else array[:, mine])


def where_of(name: str, shape: tuple[int, ...], ranks: Ranks) -> tuple[int, slice] | None:
    """Returns the axis along which a parameter is cut, and this rank's slice; None if not cut."""
    axis = axis_of(name)
    return None if axis is None or ranks.size == 1 else (axis, ranks.share(shape[axis]))


def axis_of(name: str) -> int | None:
    """Returns the axis along which a parameter of this name is cut; None if not cut."""
    return next((axis for pattern, axis in _CUTS if pattern.search(name)), None)
