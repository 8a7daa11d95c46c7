"""T5 in MLX: an encoder, and a decoder that reads any number of new tokens at a time.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (arXiv 1910.10683). Layers are pre-normed residual blocks without biases. Attention
scores are not scaled. Self-attention adds a learned bias for the distance of key and query.
Versions differ in the feed-forward (`feed_forward_proj`) and in the output head; in umT5 every
layer has its own relative bias. The layers are in mlx_t5/network/layers.py.

Symbols: B rows, S source positions, T target positions, V vocabulary. Residuals are (B·S, d_model)
in the encoder and (B·T, d_model) in the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import Any

from mlx_t5.backend import announce_kernels, mx, nn, tree_flatten
from mlx_t5.checkpoints.adapter_config import translation_entry
from mlx_t5.checkpoints.adapters import open_adapter, read_tensors
from mlx_t5.checkpoints.hub import locate
from mlx_t5.checkpoints.pooling import Pooling, read_pooling
from mlx_t5.checkpoints.reading import Weights, read_weights, require_float
from mlx_t5.errors import UserError
from mlx_t5.network import weights
from mlx_t5.network.attention import source_biases
from mlx_t5.network.cache import Cache
from mlx_t5.network.config import T5Config
from mlx_t5.network.draft_vocabulary import settle
from mlx_t5.network.layers import checkpointed, encoder_layer, heads, layer_for
from mlx_t5.network.linear import Matrix
from mlx_t5.network.memory import cache_bytes, encoder_bytes, room_for_weights, weights_bytes
from mlx_t5.network.modules import Stack, Stacks
from mlx_t5.network.sharing import ENTRY, OF_DRAFT, share, target_of
from mlx_t5.text.tokenizer import load_tokenizer

LAYERS_AT_ONCE = 6  # layers between two submissions of the graph to the device


class T5(Stacks):
    """The whole model. Parameters are named as in the MLX folders that convert.py writes.

    Args:
        config: the model's shape.
        separate_head: whether the output head has its own weights (`lm_head`); if not, it is the
            embedding. See `weights.select`.
        encoder_only: whether to leave out the decoder; only `encode` works then.
        shares_with: for a draft, the target whose embedding, encoder and head it uses; the draft's
            own parameters are then only those of its decoder (network/sharing.py).

    Attributes:
        folder: the folder from which `load` read the model.
        passes: number of decoder passes so far; after `layers.PASSES_BEFORE_COMPILING` passes, a
            GPU compiles the layers.
        grad_checkpoint: whether training recomputes activations within layers to save memory.
        progress: wraps the encoder's layers, as tqdm does, to show how far encoding is; None shows
            nothing, and does not wait for each layer.
    """

    width = 0  # passes are not padded (interface.Target)

    def __init__(
        self,
        config: T5Config,
        separate_head: bool = False,
        encoder_only: bool = False,
        shares_with: T5 | None = None,
    ):
        super().__init__()
        self.config, self.pooling = config, Pooling()
        self.shares_with: T5 | None = None
        self.folder, self.passes, self.grad_checkpoint = Path(), 0, False
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
        if not self.can_decode:
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
        x = self.shared(ids.flatten()).astype(self.encoder.last_norm.weight.dtype)
        x = self.encoder.dropped(x, 0)
        tables = source_biases(self.encoder.relative_attention_bias, batch, length, mask)
        layer: Callable[..., mx.array] = partial(encoder_layer, self.config)
        layer = checkpointed(layer) if self.grad_checkpoint else layer
        layers = self.progress(self.encoder.blocks) if self.progress else self.encoder.blocks
        for blocks, bias in zip(layers, cycle(tables), strict=False):
            x = layer(blocks, x, bias, batch)
            if self.progress:
                mx.eval(x)
        x = self.encoder.dropped(self.encoder.last_norm(x), 1)
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
            k, v = heads(self.config, [matrix.times(x) for matrix in inputs], len(encoded), 2)
            cross.append((mx.contiguous(k), mx.contiguous(v)))
        return Cache(cross, mask, capacity)

    @property
    def dtype(self) -> mx.Dtype:
        """The type that the model computes in, even if its weights are quantized."""
        return (self.encoder if "encoder" in self else self.decoder).norm.weight.dtype

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
        for i, x in enumerate(self._states(tokens, cache, offsets, self.passes), 1):
            if i % LAYERS_AT_ONCE == 0:
                mx.async_eval(x)
        self.passes += 1
        return self.logits(x).reshape(*tokens.shape, -1)

    def decoder_states(self, tokens: mx.array, cache: Cache, offsets: list[int]) -> mx.array:
        """Returns the last hidden states (B·T, d_model) of tokens (B, T), lazily; for training."""
        *_, x = self._states(tokens, cache, offsets, passes=-math.inf)
        return x

    def _states(
        self, tokens: mx.array, cache: Cache, offsets: list[int], passes: float
    ) -> Iterator[mx.array]:
        """Yields each layer's residuals, then the last norm's output; see `layer_for`."""
        slots = cache.slots(offsets, tokens.shape[1])
        layer = layer_for(self.config, slots, passes, self.grad_checkpoint)
        x = self.shared(tokens.flatten()).astype(self.decoder.last_norm.weight.dtype)
        x = self.decoder.dropped(x, 0)
        tables = self.decoder.relative_attention_bias
        index = tables[0].index(slots.positions, slots.seen)
        biases = cycle([table(index) for table in tables])
        for i, (blocks, bias) in enumerate(zip(self.decoder.blocks, biases, strict=False)):
            x = layer(blocks, x, bias, slots, i)
            yield x
        yield self.decoder.dropped(self.decoder.last_norm(x), 1)

    @cached_property
    def head(self) -> Matrix:
        """The output head's matrix, which may be the embedding."""
        return Matrix.of(getattr(self, "lm_head", self.shared))

    def logits(self, states: mx.array, head: Matrix | None = None) -> mx.array:
        """Returns float32 logits (N, V) of N states for V tokens; `head` is the model's if None."""
        if self.config.scales_logits:
            states = states * self.config.d_model**-0.5
        return (head or self.head).times(states).astype(mx.float32)


def expected_parameters(
    config: T5Config, separate_head: bool = True, encoder_only: bool = False
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of an unquantized model, by its name in MLX folders."""
    return weights.shapes_of(T5(config, separate_head and not encoder_only, encoder_only))


def select_tensors(config: T5Config, tensors: Weights, encoder_only: bool = False) -> Weights:
    """Takes the tensors that the model needs out of a Hugging Face checkpoint.

    Args:
        config: from the checkpoint's config.json.
        tensors: the checkpoint; emptied. If it has no decoder, the model is encoder-only.
        encoder_only: whether to leave out the decoder.

    Returns:
        The tensors by MLX name.

    Raises:
        UserError: a tensor is missing, unknown, of a wrong shape or of an unusable type.
    """
    encoder_only = encoder_only or not weights.has_decoder(tensors)
    return weights.select(config, tensors, expected_parameters(config, encoder_only=encoder_only))


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
        The model, and a transformers tokenizer or None if the folder has no tokenizer files.

    Raises:
        UserError: the folder does not exist and cannot be downloaded, it holds no T5 model or a
            damaged one, the adapter cannot be merged, or a draft is not given the target that it
            was made for.
    """
    folder = locate(str(folder), revision)
    raw = weights.read_config(folder) | translation_entry(adapter)
    config, target = T5Config.from_dict(raw), None
    if raw.get(ENTRY) is not None:
        target = target_of(folder, raw[ENTRY], config, shared_with, adapter)
        config = replace(target.config, **{name: getattr(config, name) for name in OF_DRAFT})
        dtype = target.dtype if dtype is None else dtype
    tensors, metadata = read_weights(folder)
    is_mlx = target is not None or metadata.get("format") == "mlx"
    quantization = raw.get("quantization") if is_mlx else None
    tensors = tensors if is_mlx else select_tensors(config, tensors)
    dtype = weights.compute_dtype(dtype, tensors)
    encoder_only = target is None and not weights.has_decoder(tensors)
    new = partial(T5, config, weights.HEAD in tensors, encoder_only, target)
    model, names = new(), set(tensors)
    plain = weights.shapes_of(model)
    if quantization:
        weights.quantize(model, quantization, names)
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    weights.check(stored, weights.shapes_of(model))
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):  # not the packed integers
            require_float(name, tensors[name])
    lora = open_adapter(adapter, weights.tensor_names(config), plain)
    if quantization and lora:
        weights.quantize(model := new(), lora.quantization(quantization), names)
    with room_for_weights(weights_bytes(tensors, dtype)):
        weights.fill(model, read_tensors(tensors, lora, quantization), dtype)
        if config.draft_vocab_size:
            settle(model)
        model.join()
    model.folder, model.pooling = folder.absolute(), read_pooling(folder, config.d_model)
    announce_kernels()
    return model, load_tokenizer(folder)
