"""The parameters of T5's layers, named as in MLX folders.

The modules are used for loading, quantizing and training. The functions that compute with
their arrays are in layers.py; a `Stack` collects the arrays for these functions.

Symbols: B rows, T target positions, N keys, H heads.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import Any

from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.network.attention import Dropout, RelativeBias
from mlx_t5.network.config import T5Config
from mlx_t5.network.interface import WeightsRead
from mlx_t5.network.layers import PASSES_BEFORE_COMPILING, Block, Blocks, Norm
from mlx_t5.network.linear import Matrix, join_layers, matrices


class Attention(nn.Module):
    """The parameters of multi-head attention and of the norm before it."""

    dropout: Dropout | None = None  # set in training, see `Stacks.drop`

    def __init__(self, config: T5Config):
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        for name in "qkv":
            self[name] = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)

    def block(self, letters: str) -> Block:
        """Norm, output projection, and the input projections named by `letters` ("qkv")."""
        inputs = matrices(*(self[letter] for letter in letters))
        return Block(Norm.of(self.norm), inputs, Matrix.of(self.o), self.dropout)


class FeedForward(nn.Module):
    """The parameters of one hidden layer, gated or not, and of the norm before it."""

    dropout: Dropout | None = None

    def __init__(self, config: T5Config):
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        for name in ("wi_0", "wi_1") if config.is_gated_act else ("wi",):
            self[name] = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def inputs(self) -> list[nn.Module]:
        return [self[name] for name in ("wi", "wi_0", "wi_1") if name in self]

    def block(self) -> Block:
        inputs = matrices(*self.inputs())
        return Block(Norm.of(self.norm), inputs, Matrix.of(self.wo), self.dropout)


class Layer(nn.Module):
    """The parameters of a decoder layer if `causal`, else of an encoder layer."""

    def __init__(self, config: T5Config, causal: bool):
        super().__init__()
        self.self_attention = Attention(config)
        if causal:
            self.cross_attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def blocks(self) -> Blocks:
        """Self-attention, cross-attention and feed-forward; cross-attention's keys are cached."""
        cross = [self.cross_attention.block("q")] if "cross_attention" in self else []
        return self.self_attention.block("qkv"), *cross, self.feed_forward.block()


class Stack(nn.Module):
    """The layers of an encoder or a decoder (`causal`), their relative bias and the last norm."""

    dropout: Dropout | None = None  # of the embeddings, and of the last norm's output

    def __init__(self, config: T5Config, causal: bool):
        super().__init__()
        depth = config.num_decoder_layers if causal else config.num_layers
        tables = depth if config.bias_per_layer else 1
        self.layers: list[Any] = [Layer(config, causal) for _ in range(depth)]
        self.relative_attention_bias = [RelativeBias(config, causal) for _ in range(tables)]
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    @cached_property
    def blocks(self) -> list[Blocks]:
        return [layer.blocks() for layer in self.layers]

    @cached_property
    def cross_inputs(self) -> list[tuple[Matrix, ...]]:
        """Each layer's projections of the source to keys and values."""
        return [matrices(layer.cross_attention.k, layer.cross_attention.v) for layer in self.layers]

    @cached_property
    def last_norm(self) -> Norm:
        return Norm.of(self.norm)

    def dropped(self, x: mx.array, place: int) -> mx.array:
        return x if self.dropout is None else self.dropout(x, place)


class Stacks(nn.Module):
    """A model that looks up the arrays of its layers once and keeps them.

    Replace weights with methods such as `update` and `load_weights`, which make the model look up
    the arrays again. After an assignment the model would still use the old arrays.
    """

    @property
    def stacks(self) -> list[Stack]:
        """Encoder and decoder, except an encoder that belongs to another model."""
        return [self[name] for name in ("encoder", "decoder") if name in self]

    def join(self) -> None:
        """Joins projections of the same input into one product, to save operations."""
        self._forget_arrays()
        for layer in chain(*(stack.layers for stack in self.stacks)):
            join_layers(*(layer.self_attention[name] for name in "qkv"))
            if "cross_attention" in layer:
                join_layers(*(layer.cross_attention[name] for name in "kv"))
            if "wi_0" in layer.feed_forward:
                join_layers(*layer.feed_forward.inputs())
            mx.clear_cache()  # frees the separate arrays, for joining the next layer

    def drop(self, key: mx.array | None) -> None:
        """Sets the random key of the model's own dropout in training; None switches it off."""
        layers = [layer for stack in self.stacks for layer in stack.layers]
        modules = [*self.stacks, *(part for layer in layers for part in layer.children().values())]
        keys = None if key is None else mx.random.split(key, 2 * len(modules)).reshape(-1, 2, 2)
        for i, module in enumerate(modules):
            # In __dict__, because a module would take the keys for parameters.
            dropout = None if keys is None else Dropout(self.config.dropout_rate, keys[i])
            vars(module)["dropout"] = dropout
        self._forget_arrays()

    def weights_read(self) -> WeightsRead:
        if "decoder" not in self:
            return WeightsRead(0, 0, "")
        blocks = self.decoder.blocks
        arrays = [leaf for _, leaf in tree_flatten([blocks, self.head])]
        size = sum(array.nbytes for array in arrays if isinstance(array, mx.array))
        output = blocks[0][-1].output
        quantization = getattr(output, "base", output).quantization
        kind = quantization[-1] if quantization else str(self.dtype).split(".")[-1]
        return WeightsRead(len(blocks), size, kind)

    def update(self, *args: Any, **options: Any) -> Stacks:
        self._forget_arrays()
        return super().update(*args, **options)

    def update_modules(self, *args: Any, **options: Any) -> Stacks:
        self._forget_arrays()
        return super().update_modules(*args, **options)

    def _forget_arrays(self) -> None:
        self.__dict__.pop("head", None)
        for stack in self.stacks:
            for name in ("blocks", "cross_inputs", "last_norm"):
                stack.__dict__.pop(name, None)


def compile_at_once(*models: Any) -> None:
    """Makes GPUs compile the models' decoder layers in the next pass: for many passes to come."""
    for model in models:
        if hasattr(model, "passes"):
            model.passes += PASSES_BEFORE_COMPILING
