"""The layers of T5, as functions over arrays; what holds the parameters is in modules.py.

Attention and feed-forward have one form: the residual is normed and projected, something is done
with that, and its projection is added to the residual. A `Block` has the arrays of one of them, and
a layer is two or three blocks. The functions take arrays, and not modules, because looking those up
would take the host longer than describing what it does with them, and because `mx.compile` wants
arrays.

Symbols: B rows, P prompts, S source positions, T target positions, N slots of the cache, H heads.
Residuals are (B·T, d_model), heads (B, H, T, d_kv), scores (B, H, T, N).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

from mlx_t5.backend import cpu_only, mx, nn, on_cpu, tree_map
from mlx_t5.network.attention import Mask, attention
from mlx_t5.network.cache import Slots
from mlx_t5.network.config import T5Config
from mlx_t5.network.linear import Matrix

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": lambda x: mx.maximum(x, 0),
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,  # the same formula, multiplied out otherwise
    "gelu_pytorch_tanh": nn.gelu_approx,
    "quick_gelu": nn.gelu_fast_approx,  # x * sigmoid(1.702 x)
    "silu": nn.silu,
    "swish": nn.silu,
    "relu6": nn.relu6,
    "tanh": mx.tanh,
}


def keep_float32(name: str, dtype: mx.Dtype) -> bool:
    """Whether a parameter stays in float32 in a model that is otherwise `dtype`.

    The output of the feed-forward leaves the range of float16 in all larger models.
    """
    return dtype == mx.float16 and ".wo." in name


class Norm(NamedTuple):
    """A norm without mean and bias, of the residual.

    Attributes:
        weight: (d_model,), in the residual's type: MLX would cast it in every call.
        eps: added to the mean square.
        dtype: of what it gives whatever the residual's, by name, as `mx.compile` takes it.
    """

    weight: mx.array
    eps: float
    dtype: str

    @classmethod
    def of(cls, module: nn.RMSNorm) -> Norm:
        """Of a model's norm."""
        dtype = module.weight.dtype
        weight = module.weight.astype(residual_dtype(dtype))
        return cls(weight, module.eps, str(dtype).removeprefix("mlx.core."))

    def __call__(self, x: mx.array) -> mx.array:
        """The residual x (M, d_model), normed."""
        return mx.fast.rms_norm(x, self.weight, self.eps).astype(getattr(mx, self.dtype))


def residual_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The residual's type: that of larger models leaves the range of float16."""
    return mx.float32 if dtype == mx.float16 else dtype


class Block(NamedTuple):
    """The arrays of attention or of the feed-forward, with the norm before it.

    Attributes:
        norm: of the residual.
        inputs: what projects the normed residual, side by side; one matrix if they are joined.
        output: whose product is added to the residual.
    """

    norm: Norm
    inputs: tuple[Matrix, ...]
    output: Matrix


Blocks: TypeAlias = tuple[Block, ...]
PASSES = 2000  # of a model, for which compiling pays
MOST_SHAPES = 256  # that are kept


def decoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """The residual x (B·T, d_model) behind layer i; its keys and values are in the cache.

    Args:
        config: of the model, or what this rank has of it.
        blocks: attention to the tokens before, attention to the source, feed-forward.
        x: the residual.
        bias: (B, H, T, N) of the attention to the tokens before.
        slots: where keys and values are written, and what may be seen.
        i: the layer's number.
    """
    self_attention, cross_attention, feed_forward = blocks
    q, k, v = heads(config, project(self_attention, x), slots.batch, 3)
    x = add_attention(x, attention(q, *slots.update(i, k, v), bias), self_attention)
    (q,) = heads(config, project(cross_attention, x), slots.prompts, 1)
    x = add_attention(x, attention(q, *slots.cross[i], slots.mask), cross_attention)
    return add_feed_forward(config, feed_forward, x)


def encoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: Mask, batch: int
) -> mx.array:
    """The residual x (B·S, d_model) behind attention among the source, and the feed-forward."""
    self_attention, feed_forward = blocks
    q, k, v = heads(config, project(self_attention, x), batch, 3)
    x = add_attention(x, attention(q, k, v, bias), self_attention)
    return add_feed_forward(config, feed_forward, x)


def checkpointed(layer: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A layer that keeps nothing of its work for the gradient but does it again then.

    So training takes less memory (Chen et al., https://arxiv.org/abs/1604.06174). MLX takes the
    gradient of all arguments, of which whole numbers, as in quantised weights, have none.
    """

    def fixed(leaf: Any) -> Any:
        whole = isinstance(leaf, mx.array) and not mx.issubdtype(leaf.dtype, mx.floating)
        return mx.stop_gradient(leaf) if whole else leaf

    return mx.checkpoint(lambda *args: layer(*tree_map(fixed, args)))


def checkpointed_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """`decoder_layer` over whole texts, `checkpointed`: keys and values are not in the cache."""

    def run(
        blocks: Blocks, x: mx.array, bias: mx.array, cross: tuple[mx.array, mx.array]
    ) -> mx.array:
        keys, values = ([mx.zeros_like(arrays[i])] for arrays in (slots.keys, slots.values))
        alone = replace(slots, keys=keys, values=values, cross=[cross])
        return decoder_layer(config, blocks, x, bias, alone, 0)

    return checkpointed(run)(blocks, x, bias, slots.cross[i])


def project(block: Block, x: mx.array) -> list[mx.array]:
    """The projections of the normed residual x (M, d_model), those that are joined side by side."""
    x = block.norm(x)
    return [matrix.times(x) for matrix in block.inputs]


def apart(outputs: Sequence[mx.array], count: int) -> Sequence[mx.array]:
    """Outputs, of which those that are joined lie side by side in axis 1, as so many arrays."""
    return outputs if len(outputs) == count else mx.split(outputs[0], count, axis=1)


def heads(
    config: T5Config, projections: Sequence[mx.array], batch: int, count: int
) -> Sequence[mx.array]:
    """Projections (B·T, H·d_kv), so many of them, as heads (B, H, T, d_kv)."""
    length = len(projections[0]) // batch
    if length == 1:  # the same without a transposition, which CUDA would copy
        ys = [y.reshape(batch, -1, 1, config.d_kv) for y in projections]
    else:
        ys = [y.reshape(batch, length, -1, config.d_kv).swapaxes(1, 2) for y in projections]
    return apart(ys, count)


def add_attention(x: mx.array, out: mx.array, block: Block) -> mx.array:
    """Residual x (B·T, d_model) plus the projection of what attention gave (B, H, T, d_kv).

    Rows that share their keys are one row, of the queries of all of them one after the other.
    """
    if out.shape[2] > 1:
        out = out.swapaxes(1, 2)
    return block.output.times(out.reshape(len(x), -1), x)


def add_feed_forward(config: T5Config, block: Block, x: mx.array) -> mx.array:
    """Residual x (M, d_model) plus wo(act(wi x)), or, gated since v1.1, wo(act(wi_0 x) * wi_1 x).

    In float16 `wo` and what it multiplies overflow, so they are computed in the residual's float32.
    """
    ys, act = project(block, x), ACTIVATIONS[config.dense_act_fn]
    if config.is_gated_act:
        gate, linear = apart(ys, 2)
        hidden = act(gate).astype(x.dtype) * linear
    else:
        hidden = act(ys[0]).astype(x.dtype)
    return block.output.times(hidden, x)


# ---- compiled, on GPUs ---------------------------------------------------------------------------


def layer_for(
    config: T5Config, slots: Any, passes: float, grad_checkpoint: bool = False
) -> Callable[..., mx.array]:
    """`decoder_layer` of a model for a pass over slots, after so many passes before.

    Describing a layer can take the host longer than a GPU takes to compute it. `mx.compile` keeps
    what was described for arrays of the same shapes. One layer is compiled rather than a pass: its
    weights are inputs, so all layers of a model are one function, a new shape costs as little as
    one layer, and the device can begin with the first ones while the host goes on.

    What is compiled has kernels of its own, which a GPU compiles at their first use. So that begins
    when it pays. Rows that attend alone (exact.py) have too many shapes. Passes of training, of
    which the number is negative, may be `checkpointed_layer`.
    """
    if grad_checkpoint and passes < 0:
        return partial(checkpointed_layer, config)
    if passes < passes_before_compiling() or not isinstance(slots, Slots):
        return partial(decoder_layer, config)
    shapes = slots.positions.shape, slots.keys[0].shape, slots.cross[0][0].shape
    return partial(_run, _compiled(config, slots.seen, *shapes, slots.mask is None))


@cache
def passes_before_compiling() -> float:
    """How many passes a model makes first. Without a GPU MLX would call a C++ compiler: never."""
    if cpu_only():
        return math.inf
    return 0 if on_cpu() else PASSES  # a rehearsal takes what GPUs have in the end


@lru_cache(MOST_SHAPES)
def _compiled(config: T5Config, seen: int, *shapes: Any) -> Callable[..., Any]:
    """Compiled for these shapes alone: MLX looks through all that a function was compiled for."""
    return mx.compile(partial(_described, config, seen))


def _run(
    run: Callable[..., Any], blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """`decoder_layer` of a model, by what was compiled."""
    keys, values = slots.keys, slots.values
    x, keys[i], values[i] = run(
        blocks, x, bias, slots.positions, keys[i], values[i], slots.cross[i], slots.mask
    )
    return x


def _described(
    config: T5Config,
    seen: int,
    blocks: Blocks,
    x: mx.array,
    bias: mx.array,
    positions: mx.array,
    keys: mx.array,
    values: mx.array,
    cross: tuple[mx.array, mx.array],
    mask: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """What is compiled: the residual behind a layer, and the keys and values of its cache."""
    slots = Slots([keys], [values], positions, None, seen, len(keys), len(cross[0]), [cross], mask)
    x = decoder_layer(config, blocks, x, bias, slots, 0)
    return x, slots.keys[0], slots.values[0]
