"""Names and shapes of a model's tensors, in Hugging Face checkpoints and in MLX folders.

Hugging Face checkpoints name tensors after their PyTorch modules, MLX folders after the modules
of model.py. Nothing is guessed: a tensor that is missing, unknown or of a wrong shape is an error
that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.reading import EMBEDDINGS, TorchTensor, Weights, as_array, require_float
from mlx_t5.errors import UserError, brief, log

EMBEDDING = EMBEDDINGS[0]
HEAD = "lm_head.weight"
Shape = tuple[int, ...]

# An early version of transformers wrote this tensor; no version uses it.
_STRAY = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# Tensors that tools add to a T5: the bytes of spiece.model, a value head of reinforcement learning;
# and biases, which T5 does not have, as zeros.
_ADDED = re.compile(r"spiece_model|v_head\..*")
_BIAS = re.compile(r"lm_head\.bias|.*layer_norm\.bias")


def has_decoder(names: Iterable[str]) -> bool:
    # Diffusion pipelines and sentence encoders have an encoder alone, saved by `T5EncoderModel`.
    decoding = (name for name in names if name not in EMBEDDINGS)
    return any(name.startswith("decoder.") or name == HEAD for name in decoding)


def tensors(config: T5Config) -> dict[str, tuple[str, Shape]]:
    """Hugging Face name → MLX name and unquantized shape of every tensor of a model."""
    width, inner = config.d_model, config.num_heads * config.d_kv
    attention = dict.fromkeys("qkv", (inner, width)) | {"o": (width, inner)}
    projections = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
    feed_forward = dict.fromkeys(projections, (config.d_ff, width)) | {"wo": (width, config.d_ff)}
    sublayers = {
        "SelfAttention": ("self_attention", attention),
        "EncDecAttention": ("cross_attention", attention),
        "DenseReluDense": ("feed_forward", feed_forward),
    }
    embedding: Shape = config.vocab_size, width
    table = {EMBEDDING: (EMBEDDING, embedding), HEAD: (HEAD, embedding)}
    depths = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    for stack, depth in depths.items():
        kinds = [kind for kind in sublayers if stack == "decoder" or kind != "EncDecAttention"]
        table[f"{stack}.final_layer_norm.weight"] = f"{stack}.norm.weight", (width,)
        for i in range(depth):
            for j, kind in enumerate(kinds):
                hub, (mlx, layers) = f"{stack}.block.{i}.layer.{j}", sublayers[kind]
                mlx = f"{stack}.layers.{i}.{mlx}"
                table[f"{hub}.layer_norm.weight"] = f"{mlx}.norm.weight", (width,)
                for layer, shape in layers.items():
                    table[f"{hub}.{kind}.{layer}.weight"] = f"{mlx}.{layer}.weight", shape
            if i == 0 or config.bias_per_layer:
                hub = f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
                buckets = config.relative_attention_num_buckets, config.num_heads
                table[hub] = f"{stack}.relative_attention_bias.{i}.weight", buckets
    return table


def tensor_names(config: T5Config) -> dict[str, str]:
    """Hugging Face name → MLX name for every tensor of a model with this config."""
    return {name: mlx for name, (mlx, _) in tensors(config).items()}


def select(config: T5Config, weights: Weights, encoder_only: bool = False) -> Weights:
    """Takes the tensors that a model needs out of a Hugging Face checkpoint, and empties it.

    An embedding that is stored several times is taken once; the output head (`lm_head.weight`) only
    if it is not a copy of the embedding.

    Args:
        config: from the checkpoint's config.json.
        weights: the checkpoint. If it has no decoder, the model is an encoder alone.
        encoder_only: whether to leave out the decoder.

    Returns:
        The tensors by MLX name.

    Raises:
        UserError: a tensor is missing, unknown, of a wrong shape or of an unusable type, or
            embeddings differ.
    """
    selected, without_decoder = tensors(config), encoder_only or not has_decoder(weights)
    if without_decoder:
        selected = {name: own for name, own in selected.items() if not has_decoder(own[:1])}
    weights.pop(_STRAY, None)
    zeros = (n for n, t in weights.items() if _BIAS.fullmatch(n) and not mx.any(as_array(t)).item())
    if added := [*filter(_ADDED.fullmatch, weights), *zeros]:
        log(f"left out, as a T5 does not use it: {', '.join(map(brief, added))}")
    for name in list(weights):
        if name in added or (without_decoder and has_decoder([name])):
            del weights[name]
    embedding, *copies = [name for name in EMBEDDINGS if name in weights] or [EMBEDDING]
    selected[embedding] = selected.pop(EMBEDDING)
    for name in copies:
        if not _equal(weights.pop(name), weights[embedding]):
            raise UserError(f"{embedding} and {name} differ, and this project's T5 has one of them")
    head = weights.get(HEAD)
    if head is None or (embedding in weights and _equal(head, weights[embedding])):
        weights.pop(HEAD, None)
        selected.pop(HEAD, None)
    prefix = os.path.commonprefix(list(weights)).rpartition(".")[0] + "."
    if prefix != "." and any(name.removeprefix(prefix) in selected for name in weights):
        cause = f"the tensors' names begin with {brief(prefix)!r}"
        raise UserError(f"{cause}; save the state dict of the T5 inside, without this prefix")
    check(weights, {name: shape for name, (_, shape) in selected.items()})
    for name, tensor in weights.items():
        require_float(name, tensor)
    return {selected[name][0]: weights.pop(name) for name in list(weights)}


def check(actual: Weights, expected: Mapping[str, Shape]) -> None:
    """Raises `UserError` with the first few differences unless names and shapes are as expected."""
    problems = []
    for kind, there, here in (("missing", actual, expected), ("unexpected", expected, actual)):
        names = [name for name in here if name not in there]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"{kind} {', '.join(map(brief, names[:3]))}{more}")
    for name in expected:
        if name in actual and actual[name].shape != expected[name]:
            problems.append(f"{name} has shape {actual[name].shape} instead of {expected[name]}")
            break
    if problems:
        raise UserError(f"the tensors do not fit config.json: {'; '.join(problems)}")


def _equal(one: mx.array | TorchTensor, other: mx.array | TorchTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, TorchTensor) and one == other:  # two views of the same elements
        return True
    return mx.array_equal(as_array(one), as_array(other)).item()
