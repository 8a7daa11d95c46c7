"""The layers of T5, as functions of arrays; modules.py holds the parameters.

Attention and feed-forward have the same form: norm and project the residual, compute, and add the
output projection to the residual. A `Block` has the arrays for one of them; a layer is two or three
blocks. The functions use arrays, not modules, because looking up parameters would take longer than
building the graph, and because `mx.compile` accepts arrays.

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
from mlx_t5.network.attention import Dropout, Mask, attention
from mlx_t5.network.cache import KeysValues, Slots
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
    """Whether a parameter stays in float32: in float16, the outputs of `wo` would overflow."""
    return dtype == mx.float16 and ".wo." in name


class Norm(NamedTuple):
    """An RMS norm of the residual; `dtype` names the output's type, which may be another."""

    weight: mx.array
    eps: float
    dtype: str

    @classmethod
    def of(cls, module: nn.RMSNorm) -> Norm:
        dtype = module.weight.dtype
        weight = module.weight.astype(residual_dtype(dtype))
        return cls(weight, module.eps, str(dtype).removeprefix("mlx.core."))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps).astype(getattr(mx, self.dtype))


def residual_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The residual's type: `dtype`, or float32 for float16, in which it would overflow."""
    return mx.float32 if dtype == mx.float16 else dtype


class Block(NamedTuple):
    """The arrays of attention or of the feed-forward, with the norm before it.

    There is a single input projection if they are joined. The output is added to the residual.
    Dropout, in training only, is of attention's probabilities or of the hidden layer, and of the
    output.
    """

    norm: Norm
    inputs: tuple[Matrix, ...]
    output: Matrix
    dropout: Dropout | None = None

    def add(self, y: mx.array, x: mx.array) -> mx.array:
        """Returns the residual x plus the output projection of y."""
        if self.dropout is None:
            return self.output.times(y, x)
        return x + self.dropout(self.output.times(y), 1)


Blocks: TypeAlias = tuple[Block, ...]
PASSES_BEFORE_COMPILING = 2000  # after this number of decoder passes, compiling a layer pays
MOST_SHAPES = 256  # number of shapes whose compiled layers are kept


def decoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """Returns the residual after decoder layer i; updates the cache. The bias is (B, H, T, N)."""
    self_attention, cross_attention, feed_forward = blocks
    q, k, v = heads(config, project(self_attention, x), slots.batch, 3)
    if drop := self_attention.dropout:  # training reads whole texts, so no slot is used again
        out = attention(q, k, v, bias[..., : k.shape[2]], drop)
    else:
        out = slots.self_attention(i, q, k, v, bias)
    x = add_attention(x, out, self_attention)
    (q,) = heads(config, project(cross_attention, x), slots.prompts, 1)
    if drop := cross_attention.dropout:
        out = attention(q, *slots.cross[i], slots.mask, drop)
    else:
        out = slots.cross_attention(i, q)
    x = add_attention(x, out, cross_attention)
    return add_feed_forward(config, feed_forward, x)


def encoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: Mask, batch: int
) -> mx.array:
    """Returns the residual (B·S, d_model) after an encoder layer."""
    self_attention, feed_forward = blocks
    q, k, v = heads(config, project(self_attention, x), batch, 3)
    out = attention(q, k, v, bias, self_attention.dropout)
    x = add_attention(x, out, self_attention)
    return add_feed_forward(config, feed_forward, x)


def checkpointed(layer: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A layer that recomputes activations in the backward pass (arXiv 1604.06174)."""

    # MLX differentiates with respect to all arguments, but integers (quantized weights) cannot be.
    def fixed(leaf: Any) -> Any:
        integer = isinstance(leaf, mx.array) and not mx.issubdtype(leaf.dtype, mx.floating)
        return mx.stop_gradient(leaf) if integer else leaf

    return mx.checkpoint(lambda *args: layer(*tree_map(fixed, args)))


def checkpointed_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """A `checkpointed` `decoder_layer` over whole texts; updates no cache."""

    def run(blocks: Blocks, x: mx.array, bias: mx.array, cross: KeysValues) -> mx.array:
        keys, values = ([mx.zeros_like(arrays[i])] for arrays in (slots.keys, slots.values))
        alone = replace(slots, keys=keys, values=values, cross=[cross])
        return decoder_layer(config, blocks, x, bias, alone, 0)

    return checkpointed(run)(blocks, x, bias, slots.cross[i])


def project(block: Block, x: mx.array) -> list[mx.array]:
    """Norms the residual x and applies the input projections, one array for all if joined."""
    x = block.norm(x)
    return [matrix.times(x) for matrix in block.inputs]


def heads(
    config: T5Config, projections: Sequence[mx.array], batch: int, count: int
) -> Sequence[mx.array]:
    """Splits `count` projections (B·T, H·d_kv), or one joined array, into (B, H, T, d_kv) each."""
    length = len(projections[0]) // batch
    if length == 1:  # without a transposition, which would be a copy on CUDA
        ys = [y.reshape(batch, -1, 1, config.d_kv) for y in projections]
    else:
        ys = [y.reshape(batch, length, -1, config.d_kv).swapaxes(1, 2) for y in projections]
    return ys if len(ys) == count else mx.split(ys[0], count, axis=1)


def add_attention(x: mx.array, out: mx.array, block: Block) -> mx.array:
    """Returns the residual x plus the projection of attention's output (B, H, T, d_kv)."""
    # With beams, the K beams of a prompt are one row with K·T queries.
    if out.shape[2] > 1:
        out = out.swapaxes(1, 2)
    return block.add(out.reshape(len(x), -1), x)


def add_feed_forward(config: T5Config, block: Block, x: mx.array) -> mx.array:
    """Returns x + wo(act(wi x)), or in T5 v1.1 x + wo(act(wi_0 x) * wi_1 x)."""
    ys, act = project(block, x), ACTIVATIONS[config.dense_act_fn]
    if config.is_gated_act:
        gate, linear = ys if len(ys) == 2 else mx.split(ys[0], 2, axis=1)
        hidden = act(gate).astype(x.dtype) * linear  # float32 in float16 models, as `wo`
    else:
        hidden = act(ys[0]).astype(x.dtype)
    if block.dropout is not None:
        hidden = block.dropout(hidden, 0)
    return block.add(hidden, x)


# ---- compiled, on GPUs ---------------------------------------------------------------------------


def layer_for(
    config: T5Config, slots: Any, passes: float, grad_checkpoint: bool = False
) -> Callable[..., mx.array]:
    """`decoder_layer` for a pass over these slots, compiled after enough passes (< 0: training)."""
    if grad_checkpoint and passes < 0:
        return partial(checkpointed_layer, config)
    # Building a layer's graph in Python can take longer than computing it on the GPU. One layer is
    # compiled, not a whole pass: the weights are inputs, so all layers share one function, and the
    # device can start with the first layers while Python continues. A compiled layer has its own
    # kernels, which a GPU compiles at their first use, so only many passes make up for it. In exact
    # decoding each row has its own number of keys: too many combinations of shapes.
    if passes < passes_before_compiling() or not isinstance(slots, Slots):
        return partial(decoder_layer, config)
    shapes = slots.positions.shape, slots.keys[0].shape, slots.cross[0][0].shape
    return _compiled(config, slots.seen, *shapes, slots.mask is None)


@cache
def passes_before_compiling() -> float:
    if cpu_only():
        return math.inf  # compiling needs a C++ compiler on a CPU
    return 0 if on_cpu() else PASSES_BEFORE_COMPILING  # T5_REHEARSE compiles at once


@lru_cache(MOST_SHAPES)
def _compiled(config: T5Config, seen: int, *shapes: Any) -> Callable[..., Any]:
    # With one function for many shapes, MLX would search its compiled graphs one by one in every
    # call. So each combination has a function of its own, which `lru_cache` finds at once.
    @mx.compile
    def run(blocks: Blocks, x, bias, positions, keys, values, cross, mask) -> tuple:
        prompts = len(cross[0])
        slots = Slots([keys], [values], positions, None, seen, len(keys), prompts, [cross], mask)
        x = decoder_layer(config, blocks, x, bias, slots, 0)
        return x, slots.keys[0], slots.values[0]

    def layer(blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int) -> mx.array:
        arrays = slots.keys[i], slots.values[i], slots.cross[i], slots.mask
        x, slots.keys[i], slots.values[i] = run(blocks, x, bias, slots.positions, *arrays)
        return x

    return layer
