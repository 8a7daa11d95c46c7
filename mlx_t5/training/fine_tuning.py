"""Prepares a model for fine-tuning, and writes the result.

Training changes either the model's own weights or LoRA adapters of some layers
(training/adapting.py). Other programs can read the result: adapters have PEFT's format, and whole
models have the format of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.adapters import LoraConfig, save_adapter
from mlx_t5.checkpoints.checkpoint import cast
from mlx_t5.checkpoints.config import read_config
from mlx_t5.checkpoints.hub import ADAPTED, source_of
from mlx_t5.checkpoints.names import EMBEDDING, HEAD, tensor_names
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.checkpoints.writing import new_model_folder, save_weights, write_json
from mlx_t5.errors import UserError
from mlx_t5.model import T5
from mlx_t5.training.adapting import Adapters
from mlx_t5.training.draft_folder import stored_dtype_of

_OF_MLX = ("quantization", "quantization_config", "converted_from")  # dropped from config.json


def paths(config: Any) -> dict[str, str]:
    """The path in `model.T5` of every attention and feed-forward layer, by Hugging Face name."""
    names = tensor_names(config).items()
    layers = {a.removesuffix(".weight"): b.removesuffix(".weight") for a, b in names}
    return {hub_name: path for hub_name, path in layers.items() if quantize_predicate(path)}


def adapt(
    model: T5, lora: LoraConfig, num_layers: int = -1, dropout: float = 0.0, seed: int = 0
) -> Adapters:
    """Adds an adapter to the layers that `lora` names, of the last `num_layers` or of all."""
    config, path_of = model.config, paths(model.config)
    first = _first_layers(config, num_layers)
    # "encoder.block.7.layer.0.SelfAttention.q"
    parts = {name: name.split(".") for name in lora.targets(path_of)}
    layers = [name for name, part in parts.items() if int(part[2]) >= first[part[0]]]
    names = () if isinstance(lora.target_modules, str) else lora.target_modules
    unused = [name for name in names if not any(f".{n}".endswith(f".{name}") for n in layers)]
    if unused:
        cause = f"--target-modules {' '.join(unused)}: this model has no such layer"
        raise UserError(f"{cause} to train; give names like q v wi_0 wo, or all-linear alone")
    for name in layers:
        inner = config.d_ff if "DenseReluDense" in name else config.num_heads * config.d_kv
        if lora.r > (side := min(inner, config.d_model)):
            raise UserError(f"--r {lora.r} is too large; {name} allows at most {side}")
    adapted = [path_of[name] for name in layers]
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
    weights: Mapping[str, mx.array],
    lora: LoraConfig,
    num_layers: int,
    overwrite: bool = False,
    **entries: Any,
) -> Path:
    names = {layer_path: hub_name for hub_name, layer_path in paths(model.config).items()}
    tensors: dict[str, dict[str, mx.array]] = {}
    for name, array in weights.items():
        layer, _, part = name.rpartition(".")
        tensors.setdefault(names[layer], {})[part] = array
    # With `num_layers`, every layer is listed: PEFT cannot limit the two stacks by one number.
    named = lora.target_modules if num_layers < 0 else sorted(tensors)
    of_lora = {name: getattr(lora, name) for name in ("r", "lora_alpha", "use_rslora", "use_dora")}
    return save_adapter(path, of_lora | {"target_modules": named} | entries, tensors, overwrite)


def write_model(
    path: Path, model: T5, source: Path, overwrite: bool = False, **entries: Any
) -> Path:
    raw, stored = read_config(source), stored_dtype_of(source)
    config = {name: value for name, value in raw.items() if name not in _OF_MLX}
    dtype, names = getattr(mx, stored), {b: a for a, b in tensor_names(model.config).items()}
    arrays = {names[name]: array for name, array in tree_flatten(model.parameters())}
    if not config.get("tie_word_embeddings", True):  # then transformers expects a separate head
        arrays.setdefault(HEAD, arrays[EMBEDDING])
    with new_model_folder(path, overwrite, source) as folder:
        tensors = ((name, cast(name, array, dtype)) for name, array in arrays.items())
        save_weights(folder, tensors, "pt")
        config |= {name: stored for name in ("torch_dtype", "dtype") if name in raw}
        write_json(folder / "config.json", config | entries)
    return path


def base_name(folder: Path) -> str:
    """The name that PEFT needs for an adapter's base model: a Hub id, or a folder's path.

    Of an MLX folder it is the model that was converted, because PEFT cannot read MLX folders.
    """
    name, record = source_of(folder), read_config(folder).get("converted_from")
    if name is not None and ADAPTED not in name:
        return name
    original = str(record.get("folder", "")) if isinstance(record, dict) and name is None else ""
    # No name is right for weights into which an adapter was merged.
    return original if Path(original).is_absolute() else str(folder.absolute())


def _first_layers(config: Any, num_layers: int) -> dict[str, int]:
    depths = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    return {n: max(0, d - num_layers) if num_layers >= 0 else 0 for n, d in depths.items()}
