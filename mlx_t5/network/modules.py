"""The parameters of T5's layers, by the names that they have in MLX folders.

The modules are there for loading, quantising, cutting and training. What computes with their arrays
is in layers.py; a `Stack` hands them over.

Symbols: B rows, T target positions, N keys, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from mlx_t5.backend import mx, nn
from mlx_t5.network.attention import ChunkedBias, Mask, RelativeBias, queries_at_once
from mlx_t5.network.cache import hiding
from mlx_t5.network.compiled import PASSES, compiled_layer, pays
from mlx_t5.network.config import T5Config
from mlx_t5.network.layers import (
    Block,
    Blocks,
    Layer,
    decoder_layer,
    encoder_layer,
    rms_norm,
)
from mlx_t5.network.linear import Matrix, join, matrices


class RMSNorm(nn.Module):
    """See `rms_norm`."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.weight = mx.ones((config.d_model,))
        self._eps = config.layer_norm_epsilon

    def __call__(self, x: mx.array) -> mx.array:
        """x (M, d_model), normed."""
        return rms_norm(x, self.weight, self._eps)


class Attention(nn.Module):
    """The parameters of multi-head attention and of the norm before it."""

    def __init__(self, config: T5Config):
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.norm = RMSNorm(config)
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)

    def block(self, names: str) -> Block:
        """Its arrays, with the projections `names` of "qkv"."""
        inputs = matrices(*(self[name] for name in names))
        return Block(self.norm.weight, inputs, Matrix.of(self.o))


class FeedForward(nn.Module):
    """The parameters of one hidden layer, gated or not, and of the norm before it."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.norm = RMSNorm(config)
        for name in ("wi_0", "wi_1") if config.is_gated_act else ("wi",):
            self[name] = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def inputs(self) -> list[nn.Module]:
        """The layers that the hidden units come from."""
        return [self[name] for name in ("wi", "wi_0", "wi_1") if name in self]

    def block(self) -> Block:
        """Its arrays."""
        return Block(self.norm.weight, matrices(*self.inputs()), Matrix.of(self.wo))


class EncoderLayer(nn.Module):
    """The parameters of `encoder_layer`."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.self_attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def blocks(self) -> Blocks:
        """Its arrays."""
        return self.self_attention.block("qkv"), self.feed_forward.block()


class DecoderLayer(nn.Module):
    """The parameters of `decoder_layer`."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.self_attention = Attention(config)
        self.cross_attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def blocks(self) -> Blocks:
        """Its arrays, without what makes keys and values of the source: those are in the cache."""
        attentions = self.self_attention.block("qkv"), self.cross_attention.block("q")
        return *attentions, self.feed_forward.block()


class Stack(nn.Module):
    """The layers of an encoder or a decoder, with their relative bias and the norm at the end.

    Attributes:
        config: of the model, or what this rank has of it.
        causal: whether it is a decoder.
        passes: how many there have been, of a decoder.
        compiles: whether they may be compiled; not where the CPU adds up what ranks compute.
    """

    def __init__(self, config: T5Config, causal: bool):
        super().__init__()
        depth = config.num_decoder_layers if causal else config.num_layers
        tables = depth if config.bias_per_layer else 1
        layer = DecoderLayer if causal else EncoderLayer
        self.config, self.causal = config, causal
        self.passes, self.compiles = 0, True
        self.layers: list[Any] = [layer(config) for _ in range(depth)]
        self.relative_attention_bias = [RelativeBias(config, causal) for _ in range(tables)]
        self.norm = RMSNorm(config)

    def join(self) -> None:
        """See `T5.join`."""
        self.forget()
        for layer in self.layers:
            join(*(layer.self_attention[name] for name in "qkv"))
            if "cross_attention" in layer:
                join(*(layer.cross_attention[name] for name in "kv"))
            if "wi_0" in layer.feed_forward:
                join(*layer.feed_forward.inputs())
            mx.clear_cache()  # of the single ones, in whose place the next layer's can be joined

    def forget(self) -> None:
        """Has the arrays of the layers looked up anew: `T5.update` replaces some."""
        self.__dict__.pop("blocks", None)

    @cached_property
    def blocks(self) -> list[Blocks]:
        """The arrays of every layer."""
        return [layer.blocks() for layer in self.layers]

    @property
    def plain(self) -> Callable[..., mx.array]:
        """`encoder_layer` or `decoder_layer` of this model."""
        return partial(decoder_layer if self.causal else encoder_layer, self.config)

    def for_pass(self, slots: Any) -> Layer:
        """What computes the layers of a decoder's pass over slots: compiled where that pays."""
        self.passes += 1
        if self.compiles and pays(self.passes, slots):
            return compiled_layer(self.config, slots)
        return self.plain

    def biases(self, queries: mx.array, keys: int, mask: mx.array | None = None) -> list[mx.array]:
        """The bias (B, H, T, N) of every layer for `queries` (B, T) and keys 0 … N-1.

        Keys that `mask` (B, N) says are padding are hidden.
        """
        tables = self.relative_attention_bias
        index = tables[0].index(queries, keys)
        biases = [table(index) for table in tables]
        if mask is not None:
            biases = [bias + hiding(mask[:, None, None], bias.dtype) for bias in biases]
        return biases if len(biases) > 1 else biases * len(self.layers)

    def source_biases(self, batch: int, length: int, mask: mx.array | None) -> Sequence[Mask]:
        """`biases` among all positions of a source; of a long one, for some queries at a time."""
        queries = queries_at_once(batch, self.config.num_heads, length)
        if queries == length:
            return self.biases(mx.arange(length)[None], length, mask)

        def of(table: RelativeBias) -> ChunkedBias:
            hidden = 0 if mask is None else hiding(mask[:, None, None], table.weight.dtype)
            make = lambda at: table(table.index(at, length)) + hidden  # noqa: E731
            return ChunkedBias(length, queries, make)

        biases = list(map(of, self.relative_attention_bias))
        return biases if len(biases) > 1 else biases * len(self.layers)


def expect_passes(*models: Any) -> None:
    """Has a GPU compile the decoder layers of models at once, as for a server: passes will come."""
    for model in models:
        if isinstance(decoder := getattr(model, "decoder", None), Stack):
            decoder.passes = PASSES
