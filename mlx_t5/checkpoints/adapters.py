"""Merges PEFT's LoRA adapters into a model's weights while the weights are read.

LoRA (Hu et al., https://arxiv.org/abs/2106.09685) changes a weight W (out, in) to W + s · B @ A,
where B (out, r) and A (r, in) are narrow matrices and s is `LoraConfig.scale`. DoRA
(https://arxiv.org/abs/2402.09353) then scales each row to a learned length. Like PEFT's
`merge_and_unload` on a float32 model, merging computes in float32; only the merged weight is
rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mlx_t5.backend import mx
from mlx_t5.checkpoints.adapter_config import CONFIG, OTHERS, LoraConfig, adapter_folder
from mlx_t5.checkpoints.quantization import (
    PARTS,
    change_weight,
    changed_settings,
    layer_settings,
)
from mlx_t5.checkpoints.reading import Weights, as_array, read_weights, require_float
from mlx_t5.checkpoints.writing import new_folder, write_json
from mlx_t5.errors import UserError, reason, shown

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_DECODER = "decoder.block."
_WEIGHT, _HEAD = ".weight", "lm_head"
_ENTRIES = {"peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM"}
Shape = tuple[int, ...]


class LowRank(NamedTuple):
    """The matrices of one layer, in float32: A (r, in), B (out, r), and DoRA's lengths (out,)."""

    down: mx.array
    up: mx.array
    lengths: mx.array | None = None


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter for one model.

    Attributes:
        scale: the factor s.
        layers: the matrices of each layer that the adapter changes, by the layer's path in the
            model.
    """

    scale: float
    layers: Mapping[str, LowRank]

    def merge(self, path: str, weight: mx.array) -> mx.array:
        """Returns the merged weight (out, in) of the layer `path`, in float32."""
        down, up, lengths = self.layers[path]
        # On the CPU, because GPUs may multiply float32 with fewer digits (TF32).
        weight = weight.astype(mx.float32) + mx.matmul(up, down, stream=mx.cpu) * self.scale
        if lengths is None:
            return weight
        norms = mx.linalg.norm(weight, axis=1)
        return (lengths / mx.where(norms > 0, norms, mx.inf))[:, None] * weight

    def quantization(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entry `quantization` of config.json as it is after merging."""
        layers = {path: changed_settings(layer_settings(entry, path)) for path in self.layers}
        return {**entry, **layers}


def read_tensors(
    weights: Weights, adapter: LoraAdapter | None, quantization: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, mx.array]]:
    """Takes the tensors out of a checkpoint one by one, merged with an adapter.

    A quantized layer that the adapter changes is quantized again, with the settings that
    `LoraAdapter.quantization` returns.

    Args:
        weights: the tensors by their names in the model; emptied.
        adapter: the adapter; None if there is none.
        quantization: the entry `quantization` of config.json; None if nothing is quantized.
    """
    for name in list(weights):
        path = name.rpartition(".")[0]
        if adapter is None or path not in adapter.layers:
            yield name, as_array(weights.pop(name))
        elif name in weights:  # else it went with another part of its layer
            names = [f"{path}.{part}" for part in PARTS if f"{path}.{part}" in weights]
            yield from change_weight(
                path,
                {part: as_array(weights.pop(part)) for part in names},
                layer_settings(quantization or {}, path),
                partial(adapter.merge, path),
            ).items()


def open_adapter(
    folder: str | Path | None, names: Mapping[str, str], shapes: Mapping[str, Shape]
) -> LoraAdapter | None:
    """Reads a PEFT adapter for a model.

    If the model is an encoder alone, the adapter's tensors for the decoder are ignored.

    Args:
        folder: the adapter's folder, with adapter_config.json and adapter_model.safetensors or
            .bin; None returns None.
        names: MLX name of the model's tensors, by Hugging Face's name.
        shapes: the shape of each tensor of the model, by MLX name, before it was quantized.

    Raises:
        UserError: the folder holds no LoRA adapter, or the adapter is damaged, does not fit the
            model, or changes a layer that cannot be merged.
    """
    if folder is None:
        return None
    folder = adapter_folder(folder)
    config = LoraConfig.read(folder)
    layers = {
        name.removesuffix(_WEIGHT): mlx.removesuffix(_WEIGHT)
        for name, mlx in names.items()
        if name.endswith(_WEIGHT) and len(shapes.get(mlx, ())) == 2
    }
    can_decode = any(name.startswith("decoder.layers.") for name in shapes)
    # A tied output head has no tensor of its own, but an adapter may still name it as a layer.
    targets = config.targets(dict.fromkeys([*layers, *([_HEAD] if can_decode else [])]))
    for layer in targets:
        if layer.rpartition(".")[2] in OTHERS:
            raise UserError(f"{CONFIG}: LoRA on {layer} cannot be merged here; merge it with PEFT")
    if not targets:
        cause = "target_modules and exclude_modules leave no layer to change"
        raise UserError(f"{folder / CONFIG}: {cause} in this model")
    weights, _ = read_weights(folder, WEIGHTS)
    expected: dict[str, Shape] = {}
    for layer in targets:
        outputs, inputs = shapes[layers[layer] + _WEIGHT]
        of_layer = (config.r, inputs), (outputs, config.r), (outputs,)
        pairs = list(zip(_tensors(layer), of_layer, strict=True))
        expected |= dict(pairs if config.use_dora else pairs[:2])
    _check(weights, expected, "" if can_decode else _PREFIX + _DECODER)
    arrays = {name: as_array(weights[name]).astype(mx.float32) for name in expected}
    mx.eval(arrays)
    matrices = {
        layers[layer]: LowRank(*(arrays[name] for name in _tensors(layer) if name in arrays))
        for layer in targets
    }
    return LoraAdapter(config.scale, matrices)


def save_adapter(
    path: Path,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, mx.array]],
    overwrite: bool = False,
) -> Path:
    """Writes an adapter folder for PEFT and `open_adapter`; the folder appears when it is complete.

    Args:
        path: the folder, as checked by `check_output_folder`.
        entries: the entries of adapter_config.json, except `peft_type` and `task_type`.
        tensors: for each layer, the LoRA matrices A and B and, with DoRA, the learned lengths of
            the weight's rows; each array is keyed by its name in PEFT.
        overwrite: whether to replace a folder at `path`.

    Returns:
        `path`.

    Raises:
        UserError: `path` was made after it was checked, or cannot be written.
    """
    named = {
        f"{_PREFIX}{layer}.{name}" + _WEIGHT * (array.ndim == 2): array.astype(mx.float32)
        for layer, arrays in tensors.items()
        for name, array in arrays.items()
    }
    try:
        with new_folder(path, overwrite) as partial_folder:
            file = str(partial_folder / WEIGHTS[0])
            mx.save_safetensors(file, named, {"format": "pt"})
            write_json(partial_folder / CONFIG, _ENTRIES | dict(entries))
    except (OSError, RuntimeError) as error:  # MLX raises the latter when a disk is full
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    return path


def _tensors(layer: str) -> list[str]:
    """Returns the names that a layer's tensors have in an adapter's file.

    The three names are those of LoRA's matrix A, LoRA's matrix B and DoRA's vector of row lengths.
    """
    parts = (f"lora_A{_WEIGHT}", f"lora_B{_WEIGHT}", "lora_magnitude_vector")
    return [f"{_PREFIX}{layer}.{part}" for part in parts]


def _check(weights: Weights, expected: Mapping[str, Shape], unused: str) -> None:
    """Raises `UserError` unless the adapter's tensors match its configuration.

    Args:
        weights: the adapter's tensors.
        expected: the shapes of the expected tensors, by name.
        unused: the prefix of tensors that are ignored; "" ignores none.
    """
    for name in weights:
        if name not in expected and not (unused and name.startswith(unused)):
            raise UserError(f"the adapter does not fit this model: {_stranger(name)}")
    for name, shape in expected.items():
        if name not in weights:
            raise UserError(f"the adapter is incomplete: {name} is missing; fetch it again")
        if weights[name].shape != shape:
            shapes = f"{weights[name].shape} instead of {shape}"
            raise UserError(f"the adapter does not fit this model: {name} has shape {shapes}")
        require_float(name, weights[name])


def _stranger(name: str) -> str:
    """Returns the part of an error message that says why an adapter's tensor is unexpected."""
    layer = shown(name.removeprefix(_PREFIX).partition(".lora_")[0])
    if layer in OTHERS and ".lora_" in name:
        return f"LoRA on {layer} cannot be merged here; merge it with PEFT"
    if ".lora_magnitude_vector" in name:
        return f"it has DoRA's lengths of {layer}, and its {CONFIG} says nothing of use_dora"
    return f"it has {shown(name)}, and no such layer is a target"
