"""Turns the tensors of a folder into the parameters of a model: names, types and values.

Hugging Face checkpoints name tensors after their PyTorch modules, MLX folders after the modules
of model.py. Nothing is guessed: a tensor that is missing, unknown or of a wrong shape is an error
that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx, nn, on_cpu, tree_flatten
from mlx_t5.checkpoints import reading
from mlx_t5.checkpoints.generation_config import FILE, TOKEN_IDS
from mlx_t5.checkpoints.reading import EMBEDDINGS, TorchTensor, Weights, as_array
from mlx_t5.disk import read_object
from mlx_t5.errors import UserError, is_out_of_memory, log, reason, shown
from mlx_t5.installation import command
from mlx_t5.network.config import T5Config
from mlx_t5.network.layers import keep_float32

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


def tensor_names(config: T5Config) -> dict[str, str]:
    """Hugging Face name → MLX name for every tensor of a model with this config."""
    names = {EMBEDDING: EMBEDDING, HEAD: HEAD}
    projections = ("wi_0", "wi_1", "wo") if config.is_gated_act else ("wi", "wo")
    sublayers = {
        "SelfAttention": ("self_attention", "qkvo"),
        "EncDecAttention": ("cross_attention", "qkvo"),
        "DenseReluDense": ("feed_forward", projections),
    }
    depths = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    for stack, depth in depths.items():
        kinds = [kind for kind in sublayers if stack == "decoder" or kind != "EncDecAttention"]
        names[f"{stack}.final_layer_norm.weight"] = f"{stack}.norm.weight"
        for i in range(depth):
            for j, kind in enumerate(kinds):
                hub, (mlx, layers) = f"{stack}.block.{i}.layer.{j}", sublayers[kind]
                mlx = f"{stack}.layers.{i}.{mlx}"
                names[f"{hub}.layer_norm.weight"] = f"{mlx}.norm.weight"
                for layer in layers:
                    names[f"{hub}.{kind}.{layer}.weight"] = f"{mlx}.{layer}.weight"
            if i == 0 or config.bias_per_layer:
                hub = f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
                names[hub] = f"{stack}.relative_attention_bias.{i}.weight"
    return names


def select(config: T5Config, weights: Weights, expected: dict[str, Shape]) -> Weights:
    """Takes the tensors that a model needs out of a Hugging Face checkpoint, and empties it.

    An embedding that is stored several times is taken once; the output head (`lm_head.weight`) only
    if it is not a copy of the embedding.

    Args:
        config: from the checkpoint's config.json.
        weights: the checkpoint.
        expected: MLX name → shape of each parameter, with a separate output head.

    Raises:
        UserError: a tensor is missing, unknown, of a wrong shape or of an unusable type, or
            embeddings differ.
    """
    selected = {name: mlx for name, mlx in tensor_names(config).items() if mlx in expected}
    weights.pop(_STRAY, None)
    zeros = (n for n, t in weights.items() if _BIAS.fullmatch(n) and not mx.any(as_array(t)).item())
    if added := [*filter(_ADDED.fullmatch, weights), *zeros]:
        log(f"left out, as a T5 does not use it: {', '.join(map(shown, added))}")
    without_decoder = not has_decoder(expected)
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
        cause = f"all its tensors' names begin with {shown(prefix)!r}"
        raise UserError(f"{cause}; save the state dict of the T5 inside, without this prefix")
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    check(shapes, {name: expected[mlx] for name, mlx in selected.items()})
    for name, tensor in weights.items():
        reading.require_float(name, tensor)
    return {selected[name]: weights.pop(name) for name in list(weights)}


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    return {name: array.shape for name, array in tree_flatten(model.parameters())}


def check(actual: dict[str, Shape], expected: dict[str, Shape]) -> None:
    """Raises `UserError` with the first few differences unless names and shapes are equal."""
    problems = []
    for kind, there, here in (("missing", actual, expected), ("unexpected", expected, actual)):
        names = [name for name in here if name not in there]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"{kind} {', '.join(map(shown, names[:3]))}{more}")
    for name in expected:
        if name in actual and tuple(actual[name]) != tuple(expected[name]):
            shapes = f"{tuple(actual[name])} instead of {tuple(expected[name])}"
            problems.append(f"{name} has shape {shapes}")
            break
    if problems:
        raise UserError(f"the tensors do not fit config.json: {'; '.join(problems)}")


def cast(name: str, rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Converts rows of the tensor `name`; refuses numbers that are too large for float16."""
    result = rows.astype(dtype)
    if dtype == mx.float16 and mx.any(mx.isinf(result) & mx.isfinite(rows)).item():
        raise UserError(f"{name} has numbers too large for float16; use bfloat16")
    return result


def _equal(one: mx.array | TorchTensor, other: mx.array | TorchTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, TorchTensor) and one == other:  # two views of the same elements
        return True
    return mx.array_equal(as_array(one), as_array(other)).item()


def read_config(folder: Path) -> dict:
    """Reads config.json; its token ids are those of generation_config.json, if it has any."""
    raw = read_object(folder / "config.json", "give a model folder, MLX or Hugging Face")
    entry = raw.get("quantization_config")
    if isinstance(entry, Mapping) and (method := entry.get("quant_method")):
        cause = f"{folder} is quantized by {shown(method)}, which cannot be read here"
        cure = f"give the original model, and quantize it with {command('convert')} -q"
        raise UserError(f"{cause}; {cure}")
    ids = read_object(folder / FILE, "fetch it again") if (folder / FILE).exists() else {}
    return raw | {name: ids[name] for name in TOKEN_IDS if ids.get(name) not in (None, [])}


def quantize(model: nn.Module, entry: Any, names: set[str]) -> None:
    """Quantizes the layers whose scales are among `names`, as config.json's `entry` says."""

    def settings(path: str, module: nn.Module) -> bool | dict:
        stored = hasattr(module, "to_quantized") and f"{path}.scales" in names
        return entry.get(path, stored) if stored else False

    try:
        general = {key: entry[key] for key in ("group_size", "bits", "mode") if key in entry}
        nn.quantize(model, **general, class_predicate=settings)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"config.json: cannot apply its quantization: {reason(error)}") from None


def fill(model: nn.Module, tensors: Iterator[tuple[str, mx.array]], dtype: mx.Dtype) -> None:
    """Sets a model's parameters, one tensor at a time; floats become `dtype` or `keep_float32`."""
    weights = []
    try:
        for name, array in tensors:
            if mx.issubdtype(array.dtype, mx.floating):
                array = array.astype(mx.float32 if keep_float32(name, dtype) else dtype)
            mx.eval(array)
            weights.append((name, array))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        cause = f"cannot load the weights ({reason(error)})"
        raise UserError(f"{cause}; are the files damaged?") from None
    model.load_weights(weights)


def compute_dtype(requested: str | mx.Dtype | None, weights: Mapping[str, Any]) -> mx.Dtype:
    """The type to compute in: `requested`, else float32 on a CPU, else the stored type."""
    if requested is None:
        requested = mx.float32 if on_cpu() else reading.stored_dtype(weights) or mx.float32
    name = reading.type_name(requested) if isinstance(requested, mx.Dtype) else requested
    if name not in reading.DTYPES:
        raise UserError(f"dtype must be bfloat16, float16 or float32, not {name}")
    return getattr(mx, name)
