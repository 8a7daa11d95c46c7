"""Merges PEFT's LoRA adapters into a model's weights while the weights are read.

LoRA (Hu et al., https://arxiv.org/abs/2106.09685) changes a weight W (out, in) to W + s · B @ A,
where B (out, r) and A (r, in) are narrow matrices and s is `LoraConfig.scale`. DoRA
(https://arxiv.org/abs/2402.09353) then scales each row to a learned length. Like PEFT's
`merge_and_unload` on a float32 model, merging computes in float32; only the merged weight is
rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlx_t5.backend import mx
from mlx_t5.checkpoints import adapter_config
from mlx_t5.checkpoints.adapter_config import CONFIG, LoraConfig, adapter_folder
from mlx_t5.checkpoints.quantization import PARTS, changed_settings, layer_settings
from mlx_t5.checkpoints.reading import EMBEDDINGS, Weights, as_array, read_weights, require_float
from mlx_t5.checkpoints.writing import new_folder, write_json
from mlx_t5.errors import UserError, reason, shown

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_WEIGHT = ".weight"
Shape = tuple[int, ...]


class LowRank(NamedTuple):
    """The matrices of one layer, in float32: A (r, in), B (out, r), and DoRA's lengths (out,)."""

    down: mx.array
    up: mx.array
    lengths: mx.array | None = None


@dataclass(frozen=True)
class LoraAdapter:
    """LoRA's matrices by the path of the layer that they change."""

    scale: float
    layers: Mapping[str, LowRank]

    def merge(self, path: str, weight: mx.array) -> mx.array:
        down, up, lengths = self.layers[path]
        # On the CPU, because GPUs may multiply float32 with fewer digits (TF32).
        weight = weight.astype(mx.float32) + mx.matmul(up, down, stream=mx.cpu) * self.scale
        if lengths is None:
            return weight
        norms = mx.linalg.norm(weight, axis=1)
        return (lengths / mx.where(norms > 0, norms, mx.inf))[:, None] * weight

    def quantization(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The entry `quantization` of config.json after merging."""
        layers = {path: changed_settings(layer_settings(entry, path)) for path in self.layers}
        return {**entry, **layers}


def read_tensors(
    weights: Weights, adapter: LoraAdapter | None, quantization: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, mx.array]]:
    """Takes the tensors out of `weights` one by one, merged with an adapter.

    Args:
        weights: the tensors by their names in the model; emptied.
        adapter: the adapter, if any. A quantized layer that it changes is quantized again.
        quantization: the entry `quantization` of config.json, if any.
    """
    for name in list(weights):
        path = name.rpartition(".")[0]
        if name not in weights:
            continue  # it went with another part of its layer
        if adapter is None or path not in adapter.layers:
            yield name, as_array(weights.pop(name))
            continue
        names = [f"{path}.{part}" for part in PARTS]
        arrays = [as_array(weights.pop(part)) for part in names if part in weights]
        if len(arrays) == 1:
            # Taken out of the list, which would hold it while the next tensor is read.
            yield name, adapter.merge(path, arrays.pop())
            continue
        if len(arrays) == 3:  # mode affine; in the other modes the scales are exact in any type
            arrays[1:] = [array.astype(mx.float32) for array in arrays[1:]]
        settings = layer_settings(quantization or {}, path)
        try:
            weight = mx.dequantize(*arrays, **settings)
        except ValueError as error:
            cause = f"{path} cannot be dequantized ({reason(error)})"
            raise UserError(f"{cause}: fetch the model again") from None
        parts = mx.quantize(adapter.merge(path, weight), **changed_settings(settings))
        yield from zip(names, parts, strict=True)


def open_adapter(
    folder: str | Path | None, tensors: Mapping[str, tuple[str, Shape]], present: Collection[str]
) -> LoraAdapter | None:
    """Reads a PEFT adapter for a model; for an encoder alone, ignores the decoder's tensors.

    Args:
        folder: has adapter_config.json and adapter_model.safetensors or .bin; None returns None.
        tensors: MLX name and unquantized shape of each tensor, by Hugging Face's name.
        present: MLX names of the tensors that the model has.

    Raises:
        UserError: the adapter is damaged, does not fit, or changes more than linear layers.
    """
    if folder is None:
        return None
    folder = adapter_folder(folder)
    config = LoraConfig.read(folder)
    layers = {
        name.removesuffix(_WEIGHT): (mlx.removesuffix(_WEIGHT), shape)
        for name, (mlx, shape) in tensors.items()
        if mlx in present and len(shape) == 2
    }
    can_decode = any(name.startswith("decoder.layers.") for name in present)
    # The places that share the embedding's weight: PEFT adapts a single one, but merges into all.
    tied = [name.removesuffix(_WEIGHT) for name in EMBEDDINGS]
    tied += ["lm_head"] if can_decode and "lm_head" not in layers else []
    targets = config.targets(dict.fromkeys([*layers, *tied]))
    for layer in targets:
        if layer in tied:
            cause = "not even by PEFT: the merge would change all places that share its weight"
            what = f"{CONFIG}: LoRA on {layer} cannot be merged, {cause}"
            raise UserError(f"{what}; train an adapter without {layer}")
        if layer.rpartition(".")[2] in adapter_config.OTHERS:
            raise UserError(f"{CONFIG}: LoRA on {layer} cannot be merged here; merge it with PEFT")
    if not targets:
        cause = "target_modules and exclude_modules leave no layer to change"
        raise UserError(f"{folder / CONFIG}: {cause} in this model")
    weights, _ = read_weights(folder, WEIGHTS)
    matrices: dict[str, LowRank] = {}
    for layer in targets:
        path, (outputs, inputs) = layers[layer]
        expected: dict[str, Shape] = {
            "lora_A.weight": (config.r, inputs),
            "lora_B.weight": (outputs, config.r),
            **({"lora_magnitude_vector": (outputs,)} if config.use_dora else {}),
        }
        arrays = []
        for part, shape in expected.items():
            name = f"{_PREFIX}{layer}.{part}"
            if (tensor := weights.pop(name, None)) is None:
                raise UserError(f"the adapter is incomplete: {name} is missing; fetch it again")
            if tensor.shape != shape:
                cause = f"{name} has shape {tensor.shape} instead of {shape}"
                raise UserError(f"the adapter does not fit this model: {cause}")
            require_float(name, tensor)
            arrays.append(as_array(tensor).astype(mx.float32))
        mx.eval(arrays)
        matrices[path] = LowRank(*arrays)
    for name in weights:
        if can_decode or not name.startswith(f"{_PREFIX}decoder.block."):
            raise UserError(f"the adapter does not fit this model: unexpected {shown(name)}")
    return LoraAdapter(config.scale, matrices)


def save_adapter(
    path: Path,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, mx.array]],
    overwrite: bool = False,
) -> Path:
    """Writes a PEFT adapter folder; it appears when it is complete.

    Args:
        path: the folder, as checked by `check_output_folder`.
        entries: the entries of adapter_config.json, except `peft_type` and `task_type`; a
            `translation_prefix` gets a file of its own.
        tensors: for each layer, its arrays by their names in PEFT.
        overwrite: whether to replace a folder at `path`.
    """
    named = {
        f"{_PREFIX}{layer}.{name}" + _WEIGHT * (array.ndim == 2): array.astype(mx.float32)
        for layer, arrays in tensors.items()
        for name, array in arrays.items()
    }
    with new_folder(path, overwrite) as partial:
        mx.save_safetensors(str(partial / WEIGHTS[0]), named, {"format": "pt"})
        config = {"peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM"} | dict(entries)
        if template := config.pop("translation_prefix", ""):
            write_json(partial / adapter_config.TRANSLATION, {"translation_prefix": template})
        write_json(partial / CONFIG, config)
    return path
