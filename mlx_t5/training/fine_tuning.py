"""Prepares a model for fine-tuning, and writes the result.

Training changes either the model's own weights or LoRA adapters of some layers
(network/adapting.py). Other programs can read the result: adapters have PEFT's format, and whole
models have the format of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.adapter_config import LoraConfig
from mlx_t5.checkpoints.adapters import save_adapter
from mlx_t5.checkpoints.hub import ADAPTED, source_of
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.checkpoints.writing import new_model_folder, save_weights, write_json
from mlx_t5.errors import UserError, reason
from mlx_t5.network.adapting import Adapters
from mlx_t5.network.weights import EMBEDDING, HEAD, cast, read_config, tensor_names
from mlx_t5.training.draft_folder import stored_dtype_of

if TYPE_CHECKING:
    from model import T5

Arrays = Mapping[str, mx.array]
_WEIGHT = ".weight"
_OF_MLX = ("quantization", "quantization_config", "converted_from")  # dropped from config.json


def paths(config: Any) -> dict[str, str]:
    """Returns the path of every attention and feed-forward layer in `model.T5`.

    The keys of the dictionary are the layers' Hugging Face names.
    """
    names = tensor_names(config).items()
    layers = {a.removesuffix(_WEIGHT): b.removesuffix(_WEIGHT) for a, b in names}
    return {hub_name: path for hub_name, path in layers.items() if quantize_predicate(path)}


def targets(config: Any, lora: LoraConfig, num_layers: int) -> list[str]:
    """Returns the Hugging Face names of the layers that get an adapter.

    Args:
        config: the model's config.
        lora: the adapter's configuration, which names the layers.
        num_layers: the number of layers to adapt at the end of each stack; -1 adapts all layers.

    Raises:
        UserError: a name matches no layer, or the rank is too large.
    """
    first = _first_layers(config, num_layers)
    layers = [
        name
        for name in lora.targets(paths(config))
        if int(name.split(".")[2]) >= first[name.split(".")[0]]
    ]
    names = () if isinstance(lora.target_modules, str) else lora.target_modules
    unused = [name for name in names if not any(f".{n}".endswith(f".{name}") for n in layers)]
    if unused:
        raise UserError(
            f"--target-modules {' '.join(unused)}: this model has no such layer of "
            "attention or feed-forward to train; give names like q v wi_0 wo, or all-linear alone"
        )
    for name in layers:
        inner = config.d_ff if "DenseReluDense" in name else config.num_heads * config.d_kv
        if lora.r > (side := min(inner, config.d_model)):
            cause = f"the smaller side of {name} is {side}"
            raise UserError(f"--r {lora.r} is too large: {cause}; give at most that")
    return layers


def adapt(
    model: T5, lora: LoraConfig, num_layers: int = -1, dropout: float = 0.0, seed: int = 0
) -> Adapters:
    """Freezes a `model.T5`, and adds adapters to the layers that `targets` returns.

    `dropout` is the dropout rate of the adapters' inputs. Raises the same errors as `targets`.
    """
    path_of, names = paths(model.config), targets(model.config, lora, num_layers)
    adapted = [path_of[name] for name in names]
    return Adapters(model, adapted, lora.r, lora.scale, lora.use_dora, dropout, seed)


def unfreeze_last(model: T5, num_layers: int) -> None:
    """Freezes a model except the last `num_layers` layers of each stack; -1 freezes nothing."""
    if num_layers < 0:
        return
    model.freeze()
    for stack, first in _first_layers(model.config, num_layers).items():
        for layer in model[stack].layers[first:]:
            layer.unfreeze()


def write_adapter(
    path: Path,
    model: T5,
    weights: Arrays,
    lora: LoraConfig,
    num_layers: int,
    overwrite: bool = False,
    **entries: Any,
) -> Path:
    """Writes the trained weights as a PEFT adapter.

    Args:
        path: the folder to write, see `save_adapter`.
        model: the trained `model.T5`.
        weights: the trained arrays, by their names in `model.T5`: the matrices A and B of each
            adapter and, with DoRA, the magnitude vector (the learned norms of the rows).
        lora: the adapter's configuration that was given to `adapt`.
        num_layers: the number of layers that was given to `adapt`.
        overwrite: whether to replace a folder at `path`.
        entries: further entries of adapter_config.json.

    Returns:
        `path`.
    """
    names = {layer_path: hub_name for hub_name, layer_path in paths(model.config).items()}
    tensors: dict[str, dict[str, mx.array]] = {}
    for name, array in weights.items():
        layer, _, part = name.rpartition(".")
        tensors.setdefault(names[layer], {})[part] = array
    # With `num_layers`, every layer is listed: PEFT cannot limit the two stacks by one number.
    named = lora.target_modules if num_layers < 0 else sorted(tensors)
    of_lora = {name: getattr(lora, name) for name in ("r", "lora_alpha", "use_rslora", "use_dora")}
    modules = named if isinstance(named, str) else list(named)
    return save_adapter(path, of_lora | {"target_modules": modules} | entries, tensors, overwrite)


def write_model(path: Path, model: T5, source: Path, overwrite: bool = False) -> Path:
    """Writes a whole model as a Hugging Face folder, which appears only when it is complete.

    Args:
        path: the folder, as checked by `check_output_folder`.
        model: a `model.T5`.
        source: the folder of the model from which training started. The written model has the same
            configuration and tokenizer, and its weights have the same dtype.
        overwrite: whether to replace a folder at `path`.

    Returns:
        `path`.

    Raises:
        UserError: a number is too large for the dtype, or the disk is full.
    """
    raw, stored = read_config(source), stored_dtype_of(source)
    config = {name: value for name, value in raw.items() if name not in _OF_MLX}
    dtype, names = getattr(mx, stored), {b: a for a, b in tensor_names(model.config).items()}
    arrays = {names[name]: array for name, array in tree_flatten(model.parameters())}
    if not config.get("tie_word_embeddings", True):  # then transformers expects a separate head
        arrays.setdefault(HEAD, arrays[EMBEDDING])
    try:
        with new_model_folder(path, overwrite, source) as folder:
            tensors = ((name, cast(name, array, dtype)) for name, array in arrays.items())
            save_weights(folder, tensors, "pt")
            config |= {name: stored for name in ("torch_dtype", "dtype") if name in raw}
            write_json(folder / "config.json", config)
    except (OSError, RuntimeError) as error:  # MLX raises the latter if a disk is full
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    return path


def base_name(folder: Path) -> str:
    """Returns the name that PEFT needs for an adapter's base model.

    The name is the Hub id of the model from which the folder was made. If no id is known, or if an
    adapter was merged into the folder's weights, the name is the folder's path.
    """
    name = source_of(folder)
    return str(folder.absolute()) if name is None or ADAPTED in name else name


def _first_layers(config: Any, num_layers: int) -> dict[str, int]:
    """Returns the index of the first trained layer in the encoder and in the decoder."""
    depths = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    return {n: max(0, d - num_layers) if num_layers >= 0 else 0 for n, d in depths.items()}
