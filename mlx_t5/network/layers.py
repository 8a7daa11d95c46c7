"""The layers of T5: attention, feed-forward, and the stacks of an encoder and a decoder.

Symbols: B rows, P prompts, S source positions, T target positions, N slots of the cache, H heads.
Residuals are (B·T, d_model), heads (B, H, T, d_kv), scores (B, H, T, N).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_t5.backend import mx, nn
from mlx_t5.network.attention import ChunkedBias, Keys, Mask, RelativeBias, attention
from mlx_t5.network.cache import Slots
from mlx_t5.network.config import T5Config
from mlx_t5.network.linear import Linear, join, together

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


class RMSNorm(nn.Module):
    """Norm without mean and bias. Its result has the weight's dtype, whatever the residual's."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.weight = mx.ones((config.d_model,))
        self._eps = config.layer_norm_epsilon

    def __call__(self, x: mx.array) -> mx.array:
        """x (M, d_model), normed."""
        return mx.fast.rms_norm(x, self.weight, self._eps).astype(self.weight.dtype)


class Attention(nn.Module):
    """Multi-head attention without scale; `norm` belongs to the residual block around it."""

    def __init__(self, config: T5Config):
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads, self.d_kv = config.num_heads, config.d_kv
        self.norm = RMSNorm(config)
        self.q = Linear(config.d_model, inner)
        self.k = Linear(config.d_model, inner)
        self.v = Linear(config.d_model, inner)
        self.o = Linear(inner, config.d_model)

    def heads(self, x: mx.array, names: str, batch: int) -> list[mx.array]:
        """What the projections `names` of "qkv" make of x (B·T, d_model), each (B, H, T, d_kv).

        x is a residual, which is normed first; for "kv" alone it is what the encoder returned.
        """
        x = self.norm(x) if "q" in names else x
        outputs = together(x, *(self[name] for name in names))
        return [y.reshape(batch, -1, self.num_heads, self.d_kv).swapaxes(1, 2) for y in outputs]

    def add(self, x: mx.array, q: mx.array, k: Keys, v: Keys, mask: Mask) -> mx.array:
        """Residual x (B·T, d_model) plus the attention, masked as `attention` says.

        Rows that share their keys are one row, of the queries of all of them one after the other.
        """
        out = attention(q, k, v, mask).swapaxes(1, 2).reshape(-1, self.num_heads * self.d_kv)
        return self.o(out, x)


class FeedForward(nn.Module):
    """One hidden layer, gated since v1.1: wo(act(wi_0(x)) * wi_1(x))."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.norm = RMSNorm(config)
        self._act = ACTIVATIONS[config.dense_act_fn]
        self._gated = config.is_gated_act
        for name in ("wi_0", "wi_1") if config.is_gated_act else ("wi",):
            self[name] = Linear(config.d_model, config.d_ff)
        self.wo = Linear(config.d_ff, config.d_model)

    def __call__(self, x: mx.array) -> mx.array:
        """The residual x (M, d_model) with what the block adds to it."""
        y = self.norm(x)
        # In float16 this product and `wo` overflow, so they are computed in the residual's float32.
        if self._gated:
            gate, linear = together(y, self.wi_0, self.wi_1)
            hidden = self._act(gate).astype(x.dtype) * linear
        else:
            hidden = self._act(self.wi(y)).astype(x.dtype)
        return self.wo(hidden, x)


class EncoderLayer(nn.Module):
    """Attention among the positions of a source, and the feed-forward."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.self_attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def __call__(self, x: mx.array, bias: Mask, batch: int) -> mx.array:
        """The residual x (B·S, d_model) behind the layer."""
        q, k, v = self.self_attention.heads(x, "qkv", batch)
        x = self.self_attention.add(x, q, k, v, bias)
        return self.feed_forward(x)


class DecoderLayer(nn.Module):
    """Attention to the tokens before, attention to the source, and the feed-forward."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.self_attention = Attention(config)
        self.cross_attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def __call__(self, x: mx.array, bias: mx.array, layer: int, slots: Slots) -> mx.array:
        """The residual x (B·T, d_model) behind the layer; its keys and values are in the cache."""
        q, k, v = self.self_attention.heads(x, "qkv", slots.batch)
        x = self.self_attention.add(x, q, *slots.update(layer, k, v), bias)
        (q,) = self.cross_attention.heads(x, "q", slots.prompts)
        x = self.cross_attention.add(x, q, *slots.cross[layer], slots.mask)
        return self.feed_forward(x)


class Stack(nn.Module):
    """The layers of an encoder or a decoder, with their relative bias and the norm at the end.

    Args:
        config: of the model.
        causal: whether it is a decoder.
    """

    def __init__(self, config: T5Config, causal: bool):
        super().__init__()
        depth = config.num_decoder_layers if causal else config.num_layers
        tables = depth if config.bias_per_layer else 1
        layer = DecoderLayer if causal else EncoderLayer
        self.layers: list[Any] = [layer(config) for _ in range(depth)]
        self.relative_attention_bias = [RelativeBias(config, causal) for _ in range(tables)]
        self.norm = RMSNorm(config)

    def join(self) -> None:
        """See `T5.join`."""
        for layer in self.layers:
            join(*(layer.self_attention[name] for name in "qkv"))
            if "cross_attention" in layer:
                join(*(layer.cross_attention[name] for name in "kv"))
            if "wi_0" in layer.feed_forward:
                join(layer.feed_forward.wi_0, layer.feed_forward.wi_1)
            mx.clear_cache()  # of the single ones, in whose place the next layer's can be joined

    def biases(self, queries: mx.array, keys: int, mask: mx.array | None = None) -> list[mx.array]:
        """The bias (B, H, T, N) of every layer for `queries` (B, T) and keys 0 … N-1.

        Keys that `mask` (B, N) says are padding are hidden.
        """
        tables = self.relative_attention_bias
        index = tables[0].index(queries, keys)
        biases = [table(index) for table in tables]
        if mask is not None:
            biases = [bias + _hide(mask, bias.dtype) for bias in biases]
        return biases if len(biases) > 1 else biases * len(self.layers)

    def chunked_biases(self, length: int, queries: int, mask: mx.array | None) -> list[ChunkedBias]:
        """`biases` for all positions 0 … N-1 as queries, so many of them at a time."""

        def of(table: RelativeBias) -> ChunkedBias:
            hidden = 0 if mask is None else _hide(mask, table.weight.dtype)
            make = lambda at: table(table.index(at, length)) + hidden  # noqa: E731
            return ChunkedBias(length, queries, make)

        biases = list(map(of, self.relative_attention_bias))
        return biases if len(biases) > 1 else biases * len(self.layers)


def _hide(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """(B, S) with 1 for tokens → (B, 1, 1, S), to be added to scores: finite, so never NaN."""
    return mx.where(mask[:, None, None, :], 0.0, mx.finfo(dtype).min).astype(dtype)
