"""The layers of T5, as functions of arrays; modules.py holds the parameters.

Attention and feed-forward have the same form: norm and project the residual, compute, and add the
output projection to the residual. A `Block` has the arrays of attention or of the feed-forward; a
layer is two or three blocks. The functions use arrays, not modules, because looking up parameters
would take longer than building the graph, and because `mx.compile` accepts arrays.

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
    "gelu_fast": nn.gelu_approx,  # the same formula, factored differently
    "gelu_pytorch_tanh": nn.gelu_approx,
    "quick_gelu": nn.gelu_fast_approx,  # x * sigmoid(1.702 x)
    "silu": nn.silu,
    "swish": nn.silu,
    "relu6": nn.relu6,
    "tanh": mx.tanh,
}


def keep_float32(name: str, dtype: mx.Dtype) -> bool:
    """Returns whether a parameter stays in float32 in a model of type `dtype`.

    In a float16 model, the feed-forward's `wo` stays in float32, because its output would overflow
    float16 in all larger models. No other parameter stays in float32.
    """
    return dtype == mx.float16 and ".wo." in name


class Norm(NamedTuple):
    """An RMS norm of the residual.

    Attributes:
        weight: (d_model,), in the residual's type: otherwise MLX would cast it in every call.
        eps: added to the mean square.
        dtype: name of the output's type, which may differ from the residual's.
    """

    weight: mx.array
    eps: float
    dtype: str

    @classmethod
    def of(cls, module: nn.RMSNorm) -> Norm:
        """Returns a module's norm, with the weight in the residual's type."""
        dtype = module.weight.dtype
        weight = module.weight.astype(residual_dtype(dtype))
        return cls(weight, module.eps, str(dtype).removeprefix("mlx.core."))

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the residual x (rows, d_model), normed."""
        return mx.fast.rms_norm(x, self.weight, self.eps).astype(getattr(mx, self.dtype))


def residual_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Returns the residual's type: `dtype`, or float32 for float16, in which it would overflow."""
    return mx.float32 if dtype == mx.float16 else dtype


class Block(NamedTuple):
    """The arrays of attention or of the feed-forward, with the norm before it.

    Attributes:
        norm: the norm of the residual.
        inputs: the input projections; a single matrix if they are joined.
        output: the output projection, which is added to the residual.
    """

    norm: Norm
    inputs: tuple[Matrix, ...]
    output: Matrix


Blocks: TypeAlias = tuple[Block, ...]
PASSES_BEFORE_COMPILING = 2000  # after this number of decoder passes, compiling a layer pays
MOST_SHAPES = 256  # number of shapes whose compiled layers are kept


def decoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """Returns the residual (B·T, d_model) after decoder layer i; updates the cache.

    Args:
        config: the shape of the model.
        blocks: self-attention, cross-attention and feed-forward.
        x: the residual before the layer.
        bias: bias of self-attention, (B rows, H heads, T queries, N slots).
        slots: the cache's slots to write to and to attend to.
        i: the layer's index.
    """
    self_attention, cross_attention, feed_forward = blocks
    q, k, v = heads(config, project(self_attention, x), slots.batch, 3)
    x = add_attention(x, slots.self_attention(i, q, k, v, bias), self_attention)
    (q,) = heads(config, project(cross_attention, x), slots.prompts, 1)
    x = add_attention(x, slots.cross_attention(i, q), cross_attention)
    return add_feed_forward(config, feed_forward, x)


def encoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: Mask, batch: int
) -> mx.array:
    """Returns the residual after an encoder layer, (B·S, d_model) for B rows of S positions."""
    self_attention, feed_forward = blocks
    q, k, v = heads(config, project(self_attention, x), batch, 3)
    x = add_attention(x, attention(q, k, v, bias), self_attention)
    return add_feed_forward(config, feed_forward, x)


def checkpointed(layer: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Returns a layer that recomputes its activations in the backward pass, to save memory.

    See Chen et al., https://arxiv.org/abs/1604.06174. MLX differentiates with respect to all
    arguments. Arrays of integers, such as quantized weights, have no gradient, so they are excluded
    with `stop_gradient`.
    """

    def fixed(leaf: Any) -> Any:
        integer = isinstance(leaf, mx.array) and not mx.issubdtype(leaf.dtype, mx.floating)
        return mx.stop_gradient(leaf) if integer else leaf

    return mx.checkpoint(lambda *args: layer(*tree_map(fixed, args)))


def checkpointed_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """Returns the result of a `checkpointed` `decoder_layer` over whole texts; updates no cache."""

    def run(
        blocks: Blocks, x: mx.array, bias: mx.array, cross: tuple[mx.array, mx.array]
    ) -> mx.array:
        keys, values = ([mx.zeros_like(arrays[i])] for arrays in (slots.keys, slots.values))
        alone = replace(slots, keys=keys, values=values, cross=[cross])
        return decoder_layer(config, blocks, x, bias, alone, 0)

    return checkpointed(run)(blocks, x, bias, slots.cross[i])


def project(block: Block, x: mx.array) -> list[mx.array]:
    """Applies the block's norm and then its input projections to the residual x.

    Returns:
        An array (rows, outputs) for each projection, or a single array if they are joined.
    """
    x = block.norm(x)
    return [matrix.times(x) for matrix in block.inputs]


def heads(
    config: T5Config, projections: Sequence[mx.array], batch: int, count: int
) -> Sequence[mx.array]:
    """Splits the outputs of `project` into heads.

    Args:
        config: the shape of the model.
        projections: `count` arrays (B·T, H·d_kv), or a single array (B·T, count·H·d_kv) if the
            projections are joined.
        batch: number of rows B; in the decoder's cross-attention, the number of prompts.
        count: number of projections, such as 3 for queries, keys and values.

    Returns:
        `count` arrays (B rows, H heads, T positions, d_kv).
    """
    length = len(projections[0]) // batch
    if length == 1:  # without a transposition, which would be a copy on CUDA
        ys = [y.reshape(batch, -1, 1, config.d_kv) for y in projections]
    else:
        ys = [y.reshape(batch, length, -1, config.d_kv).swapaxes(1, 2) for y in projections]
    return ys if len(ys) == count else mx.split(ys[0], count, axis=1)


def add_attention(x: mx.array, out: mx.array, block: Block) -> mx.array:
    """Returns the residual (B·T, d_model) plus the projection of attention's output.

    `out` is (B rows, H heads, T queries, d_kv). With beams, the K beams of a prompt are one row
    with K·T queries.
    """
    if out.shape[2] > 1:
        out = out.swapaxes(1, 2)
    return block.output.times(out.reshape(len(x), -1), x)


def add_feed_forward(config: T5Config, block: Block, x: mx.array) -> mx.array:
    """Returns x (rows, d_model) plus wo(act(wi x)), or in T5 v1.1 wo(act(wi_0 x) * wi_1 x).

    In float16, `wo` and its input would overflow, so they are in float32 like the residual.
    """
    ys, act = project(block, x), ACTIVATIONS[config.dense_act_fn]
    if config.is_gated_act:
        gate, linear = ys if len(ys) == 2 else mx.split(ys[0], 2, axis=1)
        hidden = act(gate).astype(x.dtype) * linear
    else:
        hidden = act(ys[0]).astype(x.dtype)
    return block.output.times(hidden, x)


# ---- compiled, on GPUs ---------------------------------------------------------------------------


def layer_for(
    config: T5Config, slots: Any, passes: float, grad_checkpoint: bool = False
) -> Callable[..., mx.array]:
    """Returns `decoder_layer` for a pass over these slots, compiled after enough passes.

    Building the graph of a layer in Python can take longer than computing it on the GPU.
    `mx.compile` keeps the graph for arrays of the same shapes. A single layer is compiled, not a
    whole pass: the weights are inputs, so all layers of a model share one function, a new shape
    needs one compilation, and the device can start with the first layers while Python continues.

    A compiled layer has its own kernels, which a GPU compiles at their first use. So layers are
    compiled only for models with many passes. In exact decoding layers are not compiled: each row
    has its own number of keys, so there would be too many combinations of shapes.

    Args:
        config: the shape of the model.
        slots: the slots of the pass.
        passes: number of the model's decoder passes so far; negative in training, whose layers
            must not be compiled.
        grad_checkpoint: whether to return `checkpointed_layer` in training. If `passes` is not
            negative, the value is ignored.
    """
    if grad_checkpoint and passes < 0:
        return partial(checkpointed_layer, config)
    if passes < passes_before_compiling() or not isinstance(slots, Slots):
        return partial(decoder_layer, config)
    shapes = slots.positions.shape, slots.keys[0].shape, slots.cross[0][0].shape
    return partial(_run, _compiled(config, slots.seen, *shapes, slots.mask is None))


@cache
def passes_before_compiling() -> float:
    """Returns the number of passes before layers are compiled.

    On a CPU layers are never compiled, as compiling needs a C++ compiler there: returns inf.
    """
    if cpu_only():
        return math.inf
    return 0 if on_cpu() else PASSES_BEFORE_COMPILING  # T5_REHEARSE compiles at once


@lru_cache(MOST_SHAPES)
def _compiled(config: T5Config, seen: int, *shapes: Any) -> Callable[..., Any]:
    """Returns a layer that is compiled for these shapes only.

    If one function ran with many shapes, MLX would search its compiled graphs one by one in every
    call. So each combination of shapes has a function of its own, which `lru_cache` finds at once.

    Args:
        config: the shape of the model.
        seen: number of cache slots that self-attention reads.
        *shapes: keys for `lru_cache` alone.
    """
    return mx.compile(partial(_described, config, seen))


def _run(
    run: Callable[..., Any], blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """Runs a compiled `decoder_layer`."""
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
    """Returns the residual, keys and values after a layer; `_compiled` compiles this function."""
    slots = Slots([keys], [values], positions, None, seen, len(keys), len(cross[0]), [cross], mask)
    x = decoder_layer(config, blocks, x, bias, slots, 0)
    return x, slots.keys[0], slots.values[0]
