"""T5 in MLX, whole: norm and attention, the layers with their parameters, encoder and decoder.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (arXiv 1910.10683). Layers are pre-normed residual blocks without biases. Attention
scores are not scaled. Self-attention adds a learned bias for the distance of key and query.
Versions differ in the feed-forward (`feed_forward_proj`) and in the output head; in umT5 every
layer has its own relative bias.

Modules hold the parameters. Passes compute with functions of arrays (`Block`), because looking up
parameters would take longer than building the graph, and because `mx.compile` accepts arrays.

Symbols: B rows, P prompts, S source positions, T target positions, N keys, H heads, V vocabulary.
Residuals are (B·S, d_model) in the encoder and (B·T, d_model) in the decoder.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_t5.backend import ON_CUDA, announce_kernels, cpu_only, mx, nn, tree_flatten
from mlx_t5.backend.device_memory import wired_limit
from mlx_t5.checkpoints.checkpoint import ENTRY, Checkpoint, compute_dtype
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.hub import locate
from mlx_t5.checkpoints.names import HEAD, has_decoder
from mlx_t5.checkpoints.pooling import Pooling
from mlx_t5.checkpoints.reading import type_name
from mlx_t5.errors import UserError
from mlx_t5.network.bias import Mask, RelativeBias, hiding, source_biases
from mlx_t5.network.cache import Cache, Slots
from mlx_t5.network.compiled import checkpointed, checkpointed_decoder, for_pass
from mlx_t5.network.draft_vocabulary import apply_table
from mlx_t5.network.interface import WeightsRead
from mlx_t5.network.linear import Derived, Matrix, join_layers, matrices
from mlx_t5.network.sharing import OF_DRAFT, share, target_of
from mlx_t5.network.sizes import cache_bytes, encoder_bytes, weights_bytes

if TYPE_CHECKING:  # Python 3.9 lacks it, and is to be refused in one line
    from typing import TypeAlias

LAYERS_AT_ONCE = 6  # layers between two submissions of the graph to the device

# ---- norm and attention, each in the form that suits the device ----------------------------------

# What mlx.fast has kernels for on a GPU consists of many small operations on a CPU (mlx/fast.cpp),
# which cost about 4 us each. So there norm and attention are written out in fewer operations. A
# bundled model's pass over one position has 171 operations instead of 221, and 120 once its layers
# are compiled, which fuses what is elementwise.
#
#                GPU, and 16 bits on a CPU              float32 on a CPU: WRITTEN_OUT
#   norm         mlx.fast.rms_norm                      x * rsqrt(sum(x * x) + d eps) * (sqrt(d) w)
#   attention    mlx.fast.scaled_dot_product_attention  softmax(addmm(mask, q, k.T)) @ v
#                (with a mask on CUDA: as on a CPU,
#                three kernels instead of six)
WRITTEN_OUT = cpu_only()
# On x86 MLX has no vectors for exp, which takes 30 ns a number (mlx 0.32); a power of 2 takes 10.
# So many scores have their softmax written out, too; for few, one operation is faster than five.
SLOW_EXP, MANY_SCORES = WRITTEN_OUT and platform.machine() == "x86_64", 4096


class Norm(NamedTuple):
    """An RMS norm of the residual; `dtype` names the output's type, which may be another."""

    weight: mx.array
    eps: float
    dtype: str
    written_out: bool = False

    @classmethod
    def of(cls, module: nn.RMSNorm) -> Norm:
        dtype, size = module.weight.dtype, module.weight.size
        if WRITTEN_OUT and dtype == mx.float32:
            # With the mean's 1 / d in the weight and in eps, a sum takes the place of the mean.
            return cls(module.weight * size**0.5, module.eps * size, type_name(dtype), True)
        return cls(module.weight.astype(residual_dtype(dtype)), module.eps, type_name(dtype))

    def __call__(self, x: mx.array) -> mx.array:
        if self.written_out:
            return x * mx.rsqrt(x.square().sum(-1, keepdims=True) + self.eps) * self.weight
        return mx.fast.rms_norm(x, self.weight, self.eps).astype(getattr(mx, self.dtype))


def residual_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The residual's type: `dtype`, or float32 for float16, in which it would overflow."""
    return mx.float32 if dtype == mx.float16 else dtype


class Dropout(NamedTuple):
    """Dropout in training, with a random key for each of a module's two places."""

    rate: float
    keys: mx.array

    def __call__(self, x: mx.array, place: int) -> mx.array:
        kept = mx.random.bernoulli(1 - self.rate, x.shape, self.keys[place])
        return mx.where(kept, x / (1 - self.rate), 0)


def attention(
    q: mx.array, k: mx.array, v: mx.array, mask: Mask, dropout: Dropout | None = None
) -> mx.array:
    """Returns softmax(q @ k.T + mask) @ v, (B, H, T, d_kv): scores are not scaled.

    `mask` is added to the scores, broadcast to (B, H, T, N). It may also be a bool array, True
    where keys are seen, or a function that yields chunks of the bias; None if all keys are seen.
    """
    if callable(mask):
        outputs = []
        for chunk, bias in mask():
            outputs.append(attention(q[:, :, chunk], k, v, bias, dropout))
            mx.eval(outputs[-1])  # otherwise memory for several chunks is allocated at once
        return mx.concatenate(outputs, axis=2)
    # MLX's fused function has no dropout.
    if dropout is None and not WRITTEN_OUT and (mask is None or not ON_CUDA):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    if mask is None:
        scores = q @ k.swapaxes(2, 3)
    else:
        mask = hiding(mask, q.dtype) if mask.dtype == mx.bool_ else mask
        scores = mx.addmm(mask, q, k.swapaxes(2, 3))
    if SLOW_EXP and scores.size >= MANY_SCORES and scores.dtype == mx.float32:
        powers = mx.power(2.0, (scores - scores.max(-1, keepdims=True)) * math.log2(math.e))
        weights = powers / powers.sum(-1, keepdims=True)
    else:
        weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights if dropout is None else dropout(weights, 0)) @ v


# ---- layers --------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The arrays of attention or of the feed-forward, with the norm before it.

    There is a single input projection if they are joined. The output is added to the residual.
    Dropout, in training only, is of attention's weights or of the hidden layer, and of the output.
    """

    norm: Norm
    inputs: tuple[Matrix, ...]
    output: Matrix
    dropout: Dropout | None = None

    def project(self, x: mx.array) -> list[mx.array]:
        """Norms the residual x and applies the input projections, one array for all if joined."""
        x = self.norm(x)
        return [matrix.times(x) for matrix in self.inputs]

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Mask) -> mx.array:
        return attention(q, k, v, mask, self.dropout)

    def add(self, y: mx.array, x: mx.array) -> mx.array:
        """Returns the residual x plus the output projection of y: (B·T, n), or heads."""
        if y.ndim == 4:  # (B, H, T, d_kv); with beams, the K beams of a prompt are K·T queries
            y = (y.swapaxes(1, 2) if y.shape[2] > 1 else y).reshape(len(x), -1)
        if self.dropout is None:
            return self.output.times(y, x)
        return x + self.dropout(self.output.times(y), 1)


Blocks: TypeAlias = tuple[Block, ...]


class Attention(nn.Module):
    """The parameters of multi-head attention and of the norm before it."""

    dropout: Dropout | None = None  # set in training, see `T5.drop`

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


def split_heads(
    config: T5Config, projections: Sequence[mx.array], batch: int, count: int
) -> Sequence[mx.array]:
    """Splits `count` projections (B·T, H·d_kv), or one joined array, into (B, H, T, d_kv) each."""
    length = len(projections[0]) // batch
    if length == 1:  # without a transposition, which would be a copy on CUDA
        ys = [y.reshape(batch, -1, 1, config.d_kv) for y in projections]
    else:
        ys = [y.reshape(batch, length, -1, config.d_kv).swapaxes(1, 2) for y in projections]
    return ys if len(ys) == count else mx.split(ys[0], count, axis=1)


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


def feed_forward(config: T5Config, block: Block, x: mx.array) -> mx.array:
    """Returns x + wo(act(wi x)), or in T5 v1.1 x + wo(act(wi_0 x) * wi_1 x)."""
    ys, act = block.project(x), ACTIVATIONS[config.dense_act_fn]
    if config.is_gated_act:
        gate, linear = ys if len(ys) == 2 else mx.split(ys[0], 2, axis=1)
        hidden = act(gate).astype(x.dtype) * linear  # float32 in float16 models, as `wo`
    else:
        hidden = act(ys[0]).astype(x.dtype)
    if block.dropout is not None:
        hidden = block.dropout(hidden, 0)
    return block.add(hidden, x)


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


def encoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: Mask, batch: int
) -> mx.array:
    """Returns the residual (B·S, d_model) after an encoder layer."""
    own, hidden = blocks
    q, k, v = split_heads(config, own.project(x), batch, 3)
    x = own.add(own.attend(q, k, v, bias), x)
    return feed_forward(config, hidden, x)


def decoder_layer(
    config: T5Config, blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """Returns the residual after decoder layer i; updates the cache. The bias is (B, H, T, N)."""
    own, cross, hidden = blocks
    q, k, v = split_heads(config, own.project(x), slots.batch, 3)
    x = own.add(slots.self_attention(own.attend, i, q, k, v, bias), x)
    (q,) = split_heads(config, cross.project(x), slots.prompts, 1)
    x = cross.add(slots.cross_attention(cross.attend, i, q), x)
    return feed_forward(config, hidden, x)


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
        self.derived, self.derived_cross = Derived(), Derived()

    @property
    def arrays(self) -> tuple[list[Blocks], Norm]:
        """The present arrays of every layer and of the last norm."""
        return self.derived.of(
            [*self.layers, self.norm],
            lambda: ([layer.blocks() for layer in self.layers], Norm.of(self.norm)),
        )

    @property
    def cross_inputs(self) -> list[tuple[Matrix, ...]]:
        """The matrices that compute the keys and values of each layer's cross-attention."""
        attentions = [layer.cross_attention for layer in self.layers]
        return self.derived_cross.of(attentions, lambda: [matrices(a.k, a.v) for a in attentions])

    def dropped(self, x: mx.array, place: int) -> mx.array:
        return x if self.dropout is None else self.dropout(x, place)


class T5(nn.Module):
    """The whole model. Parameters are named as in the MLX folders that convert.py writes.

    An array that is assigned to a parameter takes effect in the next pass, but not a change of the
    array itself (`weight *= 2`) before a call of `update({})`.

    Args:
        config: the model's shape.
        separate_head: whether the output head has its own weights (`lm_head`); if not, it is the
            embedding. See `names.select`.
        encoder_only: whether to leave out the decoder; only `encode` works then.
        shares_with: for a draft, the target whose embedding, encoder and head it uses; the draft's
            own parameters are then only those of its decoder (network/sharing.py).

    Attributes:
        folder: the folder from which `load` read the model.
        decoder_passes: number of decoder passes so far; the layers are compiled after
            `compiled.PASSES_BEFORE_COMPILING`.
        grad_checkpoint: whether training recomputes activations within layers to save memory.
        progress: wraps the encoder's layers, as tqdm does, to show how far encoding is; None shows
            nothing, and does not wait for each layer.
    """

    width = 0  # passes are not padded (interface.Target)
    attention = staticmethod(attention)  # for exact.py, which tests how it rounds

    def __init__(
        self,
        config: T5Config,
        separate_head: bool = False,
        encoder_only: bool = False,
        shares_with: T5 | None = None,
    ):
        super().__init__()
        self.config, self.pooling, self.derived = config, Pooling(), Derived()
        self.shares_with: T5 | None = None
        self.folder, self.decoder_passes, self.grad_checkpoint = Path(), 0, False
        self.progress: Callable[[Sequence], Iterable] | None = None
        if shares_with is not None:
            share(self, shares_with)
        else:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            self.encoder = Stack(config, causal=False)
            if separate_head or config.draft_vocab_size:
                head = config.draft_vocab_size or config.vocab_size
                self.lm_head = nn.Linear(config.d_model, head, bias=False)
        if config.draft_vocab_size:
            self.d2t = mx.arange(config.draft_vocab_size)
        if not encoder_only:
            self.decoder = Stack(config, causal=True)

    @property
    def can_decode(self) -> bool:
        """Whether the model has a decoder."""
        return "decoder" in self

    def require_decoder(self, name: str = "this model") -> None:
        """Raises `UserError` if the model is an encoder alone."""
        if "decoder" not in self:
            cause = f"{name} is an encoder alone: it makes embeddings and writes no text"
            cure = "ask for those (--embed, embed, /v1/embeddings), or take a whole model"
            raise UserError(f"{cause}; {cure}")

    def __call__(
        self, ids: mx.array, decoder_ids: mx.array, mask: mx.array | None = None
    ) -> mx.array:
        """Returns the logits of every target position; for decoding see `cache` and `decode`.

        Args:
            ids: (B, S) source tokens of B rows.
            decoder_ids: (B, T) target tokens, beginning with the start token.
            mask: (B, S), 1 or True for source tokens and 0 for padding; None without padding.

        Returns:
            float32 logits (B, T, V) over V tokens for the token after each target position.

        Raises:
            UserError: the model has no decoder.
        """
        self.require_decoder()
        batch, length = decoder_ids.shape
        cache = self.cache(self.encode(ids, mask), mask, capacity=length)
        return self.decode(decoder_ids, cache, [0] * batch)

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        """Returns the encoder's output (B, S, d_model) for B rows of S ids; mask: 0 for padding."""
        if self.shares_with is not None:
            return self.shares_with.encode(ids, mask)
        batch, length = ids.shape
        tables = source_biases(self.encoder.relative_attention_bias, batch, length, mask)
        layer: Callable[..., mx.array] = partial(encoder_layer, self.config)
        layer = checkpointed(layer) if self.grad_checkpoint else layer
        layers, norm = self.encoder.arrays
        x = self.encoder.dropped(self.shared(ids.flatten()).astype(norm.weight.dtype), 0)
        shown = self.progress(layers) if self.progress else layers
        for blocks, bias in zip(shown, cycle(tables), strict=False):
            x = layer(blocks, x, bias, batch)
            if self.progress:
                mx.eval(x)
        x = self.encoder.dropped(norm(x), 1)
        return x.reshape(batch, length, -1)

    def cache(self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1) -> Cache:
        """Returns a cache with the cross-attention keys and values of encoded prompts.

        Args:
            encoded: (B, S, d_model) output of `encode` for B rows of S source positions.
            mask: (B, S), as given to `encode`.
            capacity: target positions to allocate; `decode` adds more when it needs them.
        """
        x, cross = encoded.flatten(0, 1), []
        for inputs in self.decoder.cross_inputs:
            k, v = split_heads(self.config, [m.times(x) for m in inputs], len(encoded), 2)
            cross.append((mx.contiguous(k), mx.contiguous(v)))
        return Cache(cross, mask, capacity)

    def decode(self, tokens: mx.array, cache: Cache, offsets: list[int]) -> mx.array:
        """Feeds new tokens to the decoder, each row at its own position.

        The call does not wait for the device, which starts with the first layers while Python
        builds the graph of the rest. A token attends to the slots of `cache` up to its own, so all
        positions before `offsets` must have been fed. Later slots may have old content, which is
        overwritten or masked. Shorter rows may be padded at the end with any token; ignore the
        logits of padding.

        Args:
            tokens: (B, T) target tokens of B rows.
            cache: from `cache`; updated in place.
            offsets: absolute position of each row's first token.

        Returns:
            float32 logits (B, T, V) over V tokens for the token after each of `tokens`.

        Raises:
            ValueError: the cache has a different number of rows.
        """
        slots = cache.slots(offsets, tokens.shape[1])
        layer = for_pass(decoder_layer, self.config, slots, self.decoder_passes)
        for i, x in enumerate(self._states(tokens, slots, layer), 1):
            if i % LAYERS_AT_ONCE == 0:
                mx.async_eval(x)
        self.decoder_passes += 1
        return self.logits(x).reshape(*tokens.shape, -1)

    def decoder_states(self, tokens: mx.array, cache: Cache) -> mx.array:
        """Returns the last hidden states (B·T, d_model) of whole texts (B, T); for training."""
        layer: Callable[..., mx.array] = partial(decoder_layer, self.config)
        layer = checkpointed_decoder(layer) if self.grad_checkpoint else layer
        *_, x = self._states(tokens, cache.whole(tokens.shape[1]), layer)
        return x

    def _states(
        self, tokens: mx.array, slots: Slots, layer: Callable[..., mx.array]
    ) -> Iterator[mx.array]:
        """Yields each layer's residuals, then the last norm's output."""
        layers, norm = self.decoder.arrays
        x = self.decoder.dropped(self.shared(tokens.flatten()).astype(norm.weight.dtype), 0)
        tables = self.decoder.relative_attention_bias
        index = tables[0].index(slots.queries, slots.seen)
        biases = cycle([table(index) for table in tables])
        for i, (blocks, bias) in enumerate(zip(layers, biases, strict=False)):
            x = layer(blocks, x, bias, slots, i)
            yield x
        yield self.decoder.dropped(norm(x), 1)

    @property
    def head(self) -> Matrix:
        """The output head's matrix, which may be the embedding."""
        layer = getattr(self, "lm_head", self.shared)
        return self.derived.of([layer], partial(Matrix.of, layer))

    def logits(self, states: mx.array, head: Matrix | None = None) -> mx.array:
        """Returns float32 logits (N, V) of N states for V tokens; `head` is the model's if None."""
        if self.config.scales_logits:
            states = states * self.config.d_model**-0.5
        return (head or self.head).times(states).astype(mx.float32)

    @property
    def dtype(self) -> mx.Dtype:
        """The type that the model computes in, even if its weights are quantized."""
        stack = self.decoder if "decoder" in self else self.encoder
        return stack.norm.weight.dtype

    @property
    def stacks(self) -> list[Stack]:
        """Encoder and decoder, except an encoder that belongs to another model."""
        return [self[name] for name in ("encoder", "decoder") if name in self]

    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int:
        """Returns the size in bytes of a cache for `prompts` prompts of `source` tokens each.

        The cache also holds `rows` texts of `target` tokens each; 0 stands for one text per prompt.
        """
        return cache_bytes(self.config, self.dtype.size, prompts, source, target, rows)

    def encoder_memory(self, rows: int, source: int) -> int:
        """Returns the bytes for encoding `rows` prompts; 0 for a draft without an encoder."""
        if self.shares_with is not None:
            return 0
        return encoder_bytes(self.config, self.dtype.size, rows, source)

    def weights_read(self) -> WeightsRead:
        if "decoder" not in self:
            return WeightsRead(0, 0, "")
        layers, _ = self.decoder.arrays
        arrays = [leaf for _, leaf in tree_flatten([layers, self.head])]
        size = sum(array.nbytes for array in arrays if isinstance(array, mx.array))
        kind = getattr(self.decoder.layers[0].feed_forward.wo, "mode", type_name(self.dtype))
        return WeightsRead(len(layers), size, kind)

    def join(self) -> None:
        """Joins projections of the same input into one product, to save operations."""
        self.update({})
        for layer in chain(*(stack.layers for stack in self.stacks)):
            join_layers(*(layer.self_attention[name] for name in "qkv"))
            if "cross_attention" in layer:
                join_layers(*(layer.cross_attention[name] for name in "kv"))
            join_layers(*layer.feed_forward.inputs())
            mx.clear_cache()  # frees the separate arrays, for joining the next layer

    def drop(self, key: mx.array | None) -> None:
        """Sets the random key of the model's own dropout in training; None switches it off."""
        layers = chain(*(stack.layers for stack in self.stacks))
        modules = [*self.stacks, *chain(*(layer.values() for layer in layers))]
        keys = None if key is None else mx.random.split(key, 2 * len(modules)).reshape(-1, 2, 2)
        for i, module in enumerate(modules):
            # In __dict__, because a module would take the keys for parameters.
            dropout = None if keys is None else Dropout(self.config.dropout_rate, keys[i])
            vars(module)["dropout"] = dropout
        self.update({})

    def update(self, *args: Any, **options: Any) -> T5:
        self.derived = Derived()  # frees the memory of old arrays now, not in the next pass
        for stack in self.stacks:
            stack.derived, stack.derived_cross = Derived(), Derived()
        return super().update(*args, **options)


def load(
    folder: str | Path,
    dtype: str | mx.Dtype | None = None,
    adapter: str | Path | None = None,
    shared_with: T5 | None = None,
    revision: str | None = None,
) -> tuple[T5, Any]:
    """Loads a model and its tokenizer from an MLX folder, a Hugging Face folder or the Hub.

    Args:
        folder: a folder with config.json, the weights and optionally a tokenizer; the name of a
            folder in `models/`; or a Hub id, which is downloaded and read without conversion.
        dtype: type to compute in: "bfloat16", "float16" or "float32". None uses the folder's type
            on a GPU, and float32 on a CPU, where the 16-bit types are slow. For a draft that uses
            its target's encoder, None uses the target's type.
        adapter: folder of a PEFT LoRA adapter to merge into the weights.
        shared_with: the target, for a draft that uses its encoder; ignored by other models.
        revision: branch, tag or commit of a Hub id.

    Returns:
        The model, and its `Tokenizer` (or a transformers tokenizer, if only that reads the files);
        None if the folder has no tokenizer files.

    Raises:
        UserError: the folder does not exist and cannot be downloaded, it holds no T5 model or a
            damaged one, the adapter cannot be merged, or a draft is not given the target that it
            was made for.
    """
    checkpoint = Checkpoint.open(locate(str(folder), revision), adapter)
    config, weights, target = checkpoint.config, checkpoint.weights, None
    if (entry := checkpoint.raw.get(ENTRY)) is not None:
        target = target_of(checkpoint.folder, entry, config, shared_with)
        config = replace(target.config, **{name: getattr(config, name) for name in OF_DRAFT})
        dtype = target.dtype if dtype is None else dtype
    dtype = compute_dtype(dtype, weights)
    encoder_only = target is None and not has_decoder(weights)
    with wired_limit(weights_bytes(weights, dtype)):
        new = partial(T5, config, HEAD in weights, encoder_only, target)
        model = checkpoint.model(new, dtype)
        if config.draft_vocab_size:
            apply_table(model)
        model.join()
    model.folder, model.pooling = checkpoint.folder.absolute(), checkpoint.pooling
    announce_kernels()
    return model, checkpoint.tokenizer
