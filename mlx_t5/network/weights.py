"""Turns the tensors of a folder into the parameters of a model: names, types and values.

Hugging Face checkpoints name tensors after their PyTorch modules, MLX folders after the modules
of model.py. Nothing is guessed: a tensor that is missing, unknown or of a wrong shape is an error
that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx, nn, on_cpu, tree_flatten
from mlx_t5.checkpoints.checkpoint import (
    EMBEDDINGS,
    SAFETENSORS,
    Checkpoint,
    read_weight_map,
    stored_dtype,
)
from mlx_t5.checkpoints.generation_config import FILE, TOKEN_IDS
from mlx_t5.checkpoints.small_files import read_object
from mlx_t5.errors import UserError, is_out_of_memory, reason, shown
from mlx_t5.network.config import T5Config
from mlx_t5.network.layers import keep_float32
from mlx_t5.network.ranks import Ranks
from mlx_t5.network.sharding import where_of

EMBEDDING = EMBEDDINGS[0]
HEAD = "lm_head.weight"
Shape = tuple[int, ...]

# An early version of transformers wrote this tensor; no version uses it.
_STRAY = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def has_decoder(names: Iterable[str]) -> bool:
    """Returns whether tensors with these names, Hugging Face's or MLX's, include a decoder.

    Diffusion pipelines and sentence encoders have an encoder alone, saved by `T5EncoderModel`.
    """
    decoding = (name for name in names if name not in EMBEDDINGS)
    return any(name.startswith("decoder.") or name == HEAD for name in decoding)


def tensor_names(config: T5Config) -> dict[str, str]:
    """Returns Hugging Face name → MLX name for every tensor of a model with this config."""
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


def select(config: T5Config, checkpoint: Checkpoint, expected: dict[str, Shape]) -> dict[str, str]:
    """Returns Hugging Face name → MLX name for the tensors of a checkpoint that the model needs.

    An embedding that is stored several times is selected once. The output head (`lm_head.weight`)
    is selected only if it is not a copy of the embedding.

    Args:
        config: from the checkpoint's config.json.
        checkpoint: the stored tensors. A stored head is compared with the embedding by value.
        expected: MLX name → shape of each parameter of the model. If the model has a decoder, a
            separate output head is included, even if the checkpoint has none.

    Raises:
        UserError: a tensor is missing, unknown or of a wrong shape.
    """
    selected = {name: mlx for name, mlx in tensor_names(config).items() if mlx in expected}
    stored = [name for name in checkpoint.names if name != _STRAY]
    if not has_decoder(expected):
        stored = [name for name in stored if not has_decoder([name])]
    embedding = next((name for name in EMBEDDINGS if name in stored), EMBEDDING)
    selected[embedding] = selected.pop(EMBEDDING)
    duplicates = {name for name in EMBEDDINGS if name != embedding}
    if HEAD not in stored or (embedding in stored and _equal(checkpoint, HEAD, embedding)):
        duplicates.add(HEAD)
        selected.pop(HEAD, None)
    shapes = {name: checkpoint.shape(name) for name in stored if name not in duplicates}
    check(shapes, {name: expected[mlx] for name, mlx in selected.items()})
    return selected


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Returns the shape of every parameter, by its name."""
    return {name: array.shape for name, array in tree_flatten(model.parameters())}


def check(actual: dict[str, Shape], expected: dict[str, Shape]) -> None:
    """Checks that two sets of tensors have the same names and shapes.

    Raises:
        UserError: they differ; the message names the first few differences.
    """
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
    """Returns rows of the tensor `name`, converted to the floating-point type `dtype`.

    Raises:
        UserError: a number is too large for `dtype`.
    """
    result = rows.astype(dtype)
    if dtype == mx.float16 and mx.any(mx.isinf(result) & mx.isfinite(rows)).item():
        raise UserError(f"{name} has numbers too large for float16; use bfloat16")
    return result


def _equal(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Returns whether two tensors hold the same values; compares a few rows at a time."""
    if checkpoint.storage(a) == checkpoint.storage(b):
        return True
    if checkpoint.shape(a) != checkpoint.shape(b) or checkpoint.dtype(a) != checkpoint.dtype(b):
        return False
    tiles = zip(checkpoint.row_tiles(a, 2**24), checkpoint.row_tiles(b, 2**24), strict=True)
    return all(mx.array_equal(x, y).item() for x, y in tiles)


def read_config(folder: Path) -> dict:
    """Returns the object in a folder's config.json.

    Its start, end and pad ids are those of generation_config.json, if they are there, because
    transformers generates with these.

    Raises:
        UserError: the file is missing, or a file is not a JSON object.
    """
    raw = read_object(folder / "config.json", "give a model folder, MLX or Hugging Face")
    ids = read_object(folder / FILE, "fetch it again") if (folder / FILE).exists() else {}
    return raw | {name: ids[name] for name in TOKEN_IDS if ids.get(name) not in (None, [])}


def has_adapter(raw: dict) -> bool:
    """Returns whether config.json says that an adapter was merged when the folder was converted."""
    origin = raw.get("converted_from")
    return isinstance(origin, dict) and "adapter" in origin


def quantize(model: nn.Module, entry: Any, names: set[str]) -> None:
    """Quantizes the layers whose scales are among `names`, as config.json describes.

    Args:
        model: changed in place; its weights have to be loaded afterwards.
        entry: the config's `quantization`: group_size, bits and mode of all layers; a layer that
            differs has an entry under its path.
        names: names of the folder's tensors.

    Raises:
        UserError: the entry cannot be applied.
    """

    def settings(path: str, module: nn.Module) -> bool | dict:
        stored = hasattr(module, "to_quantized") and f"{path}.scales" in names
        return entry.get(path, stored) if stored else False

    try:
        general = {key: entry[key] for key in ("group_size", "bits", "mode") if key in entry}
        nn.quantize(model, **general, class_predicate=settings)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"config.json: cannot apply its quantization: {reason(error)}") from None


def read_mlx(folder: Path) -> Iterator[tuple[str, mx.array]]:
    """Yields names and lazy arrays of an MLX folder's tensors; evaluating an array reads a file."""
    if (folder / SAFETENSORS).is_file():
        files = {SAFETENSORS}
    else:
        files = set(read_weight_map(folder / f"{SAFETENSORS}.index.json").values())
    arrays: dict[str, mx.array] = {}
    for file in sorted(files):
        arrays |= mx.load(str(folder / file))
    while arrays:
        yield arrays.popitem()


def read_shards(
    stored: Checkpoint, mlx_names: Mapping[str, str], ranks: Ranks, uncut: bool = False
) -> Iterator[tuple[str, mx.array]]:
    """Yields each tensor's MLX name and this rank's shard of it, in its stored type.

    Only these shards are read from the files.

    Args:
        stored: the checkpoint.
        mlx_names: stored name → MLX name of the tensors to read.
        ranks: the ranks that share the model.
        uncut: whether to yield whole tensors, for an adapter to change before they are cut.
    """
    names, cuts = [name for name in stored.names if name in mlx_names], ranks.size > 1
    if cuts:  # cutting copies a tensor, so the largest come first, while memory is free
        names.sort(key=lambda name: -stored.nbytes(name))
    for name in names:
        shape = stored.shape(name)
        where = where_of(mlx_names[name], shape, ranks) if cuts and not uncut else None
        yield mlx_names[name], stored.part(name, *(where or (0, slice(0, shape[0]))))


def fill(model: nn.Module, tensors: Iterator[tuple[str, mx.array]], dtype: mx.Dtype) -> None:
    """Sets a model's parameters; reads one tensor at a time, and converts floats to `dtype`.

    Args:
        model: has exactly the parameters in `tensors`.
        tensors: pairs of MLX name and value.
        dtype: type of floating-point parameters; see also `keep_float32`.

    Raises:
        UserError: a file cannot be read.
        RuntimeError: the device does not have enough memory.
    """
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


def compute_dtype(requested: str | mx.Dtype | None, stored: Checkpoint) -> mx.Dtype:
    """Returns the type to compute in: `requested`, else float32 on a CPU, else the stored type.

    Raises:
        UserError: the requested type is not supported.
    """
    if requested is None:
        requested = "float32" if on_cpu() else stored_dtype(stored)
    name = str(requested).removeprefix("mlx.core.")
    if name not in ("bfloat16", "float16", "float32"):
        raise UserError(f"dtype must be bfloat16, float16 or float32, not {name}")
    return getattr(mx, name)
