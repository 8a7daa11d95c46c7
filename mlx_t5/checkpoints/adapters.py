"""Merges PEFT's LoRA adapters into a model's weights while the weights are read.

LoRA (Hu et al., https://arxiv.org/abs/2106.09685) changes a weight W (out, in) to W + s · B @ A,
where B (out, r) and A (r, in) are narrow matrices and s is `LoraConfig.scale`. DoRA
(https://arxiv.org/abs/2402.09353) then scales each row to a learned length. Like PEFT's
`merge_and_unload` on a float32 model, merging computes in float32; only the merged weight is
rounded.

The entries of adapter_config.json are those of `LoraConfig` in PEFT 0.21. LoRA, rank-stabilized
LoRA and DoRA of linear layers are supported. An entry that asks for anything else raises an error.
Otherwise the adapter would be merged only in part, and nobody would notice, because the text stays
fluent. A regular expression for the names of layers is refused too: a hostile one takes years to
match.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.checkpoints.quantization import PARTS, layer_settings
from mlx_t5.checkpoints.reading import EMBEDDINGS, Weights, as_array, read_weights, require_float
from mlx_t5.checkpoints.writing import new_folder, write_json
from mlx_t5.disk import absolute, read_object
from mlx_t5.errors import UserError, brief, reason
from mlx_t5.installation import command
from mlx_t5.settings import FLAG, Range, checked

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TRANSLATION = "translation.json"  # a file of its own, as PEFT warns of unknown entries
# Layers that cannot be adapted: those that are not linear, and the output head. For the head, PEFT
# also saves the base weight, and the head may be tied to the embedding.
OTHERS = ("shared", "embed_tokens", "relative_attention_bias", "lm_head")
ALL_LINEAR = "all-linear"
_NUMBERS = {
    "r": Range(int, 1, 1 << 16, "a whole number from 1 to 65536"),
    "lora_alpha": Range(float, -1e6, 1e6, "a number from -1000000 to 1000000"),
    "use_rslora": FLAG,
    "use_dora": FLAG,
}
_MODULES = ("target_modules", "exclude_modules")
# Entries that limit or change what is merged, and the values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("rank_pattern", "alpha_pattern", "layers_pattern", "layers_to_transform"), ([], {}, "")
    ),
    "bias": ("none", "lora_only"),  # T5's linear layers have no bias
    # Once an adapter is trained, its initialization does not matter, but "pissa" and its like
    # change the base model too.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
}
# Entries about the adapter's training and origin, which do not affect merging. `fan_in_fan_out` has
# no effect either: PEFT turns it off for layers that store no transposed weight, such as T5's.
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "fan_in_fan_out inference_mode loftq_config lora_dropout lora_ga_config megatron_config "
    "peft_type peft_version revision runtime_config task_type".split()
)
_PREFIX = "base_model.model."
_WEIGHT = ".weight"
Shape = tuple[int, ...]


def adapter_folder(name: str | Path) -> Path:
    folder = absolute(name)
    if not name or not folder.is_dir():
        raise UserError(f"there is no adapter folder {str(name)!r}; give a PEFT adapter's folder")
    return folder


@dataclass(frozen=True)
class LoraConfig:
    """The entries of adapter_config.json that matter for merging, named as in PEFT's class.

    Attributes:
        r: the rank.
        lora_alpha: B @ A is multiplied by lora_alpha / r, or with `use_rslora` / sqrt(r).
        use_rslora: see `lora_alpha`.
        use_dora: whether each row of a changed weight is then scaled to a learned length.
        target_modules: names of layers or the ends of names ("q", "SelfAttention.q"), or
            `ALL_LINEAR`.
        exclude_modules: names, or ends of names, of layers that stay unchanged.
    """

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: str | tuple[str, ...] = ("q", "v")  # PEFT's default for T5
    exclude_modules: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        return cls.from_dict(read_object(folder / CONFIG, "give the folder of a PEFT adapter"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LoraConfig:
        raw = {name: value for name, value in raw.items() if value is not None}
        if "lora_parameters" in raw:
            cure = f"train one with {command('finetune')}"
            raise UserError(f"{CONFIG} is of an mlx-lm adapter, for other models; {cure}")
        if (kind := raw.get("peft_type")) != "LORA":
            raise UserError(f"{CONFIG}: peft_type {brief(kind)} cannot be merged; only LORA can")
        entries: dict[str, Any] = {}
        for name, value in raw.items():
            lower = value.lower() if isinstance(value, str) else value
            if name in _NUMBERS:
                entries[name] = checked(f"{CONFIG}: {name}", value, _NUMBERS[name])
            elif name == "target_modules" and lower == ALL_LINEAR:
                entries[name] = ALL_LINEAR
            elif name in _MODULES and isinstance(value, list) and set(map(type, value)) <= {str}:
                entries[name] = tuple(value)
            elif name in _MODULES or not _is_neutral(name, lower):
                entry = f"{brief(name)} {brief(value)}"
                raise UserError(f"{CONFIG}: {entry} cannot be merged here; merge it with PEFT")
        return cls(**entries)

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def targets(self, layers: Iterable[str]) -> list[str]:
        layers = [layer for layer in layers if not _is_named(layer, self.exclude_modules)]
        if self.target_modules == ALL_LINEAR:
            return [layer for layer in layers if layer.rpartition(".")[2] not in OTHERS]
        return [layer for layer in layers if _is_named(layer, self.target_modules)]


def _is_neutral(name: str, value: Any) -> bool:
    if name in _NEUTRAL:
        return value in _NEUTRAL[name]
    # An unknown number or text is harmless; a flag, a list or an object may enable a feature.
    asks = value is True or (isinstance(value, (list, dict)) and len(value) > 0)
    return name in _WITHOUT_EFFECT or not asks


def _is_named(layer: str, names: Iterable[str]) -> bool:
    return any(layer == name or layer.endswith(f".{name}") for name in names)


@dataclass(frozen=True)
class LowRank:
    """The matrices of one layer, in float32."""

    a: mx.array  # (r, in)
    b: mx.array  # (out, r)
    magnitude: mx.array | None = None  # (out,), DoRA's lengths


@dataclass(frozen=True)
class LoraAdapter:
    """LoRA's matrices by the path of the layer that they change."""

    scale: float
    layers: Mapping[str, LowRank]

    def merge(self, path: str, weight: mx.array) -> mx.array:
        lora = self.layers[path]
        # On the CPU, because GPUs may multiply float32 with fewer digits (TF32).
        change = mx.matmul(lora.b, lora.a, stream=mx.cpu) * self.scale
        weight = weight.astype(mx.float32) + change
        if lora.magnitude is None:
            return weight
        norms = mx.linalg.norm(weight, axis=1)
        return (lora.magnitude / mx.where(norms > 0, norms, mx.inf))[:, None] * weight

    def merged(
        self, path: str, weights: Weights, quantization: Mapping[str, Any]
    ) -> Iterator[tuple[str, mx.array]]:
        """Takes a layer's tensors out of `weights`; a quantized layer is quantized again."""
        names = [f"{path}.{part}" for part in PARTS]
        arrays = [as_array(weights.pop(name)) for name in names if name in weights]
        if len(arrays) == 1:
            # Taken out of the list, which would hold it while the next tensor is read.
            yield names[0], self.merge(path, arrays.pop())
            return
        if len(arrays) == 3:  # mode affine; in the other modes the scales are exact in any type
            arrays[1:] = [array.astype(mx.float32) for array in arrays[1:]]
        settings = layer_settings(quantization, path)
        try:
            weight = mx.dequantize(*arrays, **settings)
        except ValueError as error:
            raise UserError(f"{path}: {reason(error)}; fetch the model again") from None
        parts = mx.quantize(self.merge(path, weight), **_requantized(settings))
        yield from zip(names, parts, strict=True)

    def quantization(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The entry `quantization` of config.json after merging."""
        layers = {path: _requantized(layer_settings(entry, path)) for path in self.layers}
        return {**entry, **layers}


def _requantized(settings: Mapping[str, Any]) -> dict[str, Any]:
    # 8 bits, because fewer would round away much of an adapter's change.
    return {"group_size": max(32, settings.get("group_size", 64)), "bits": 8, "mode": "affine"}


def open_adapter(
    folder: Path, tensors: Mapping[str, tuple[str, Shape]], present: Collection[str]
) -> LoraAdapter:
    """Reads a PEFT adapter for a model; for an encoder alone, ignores the decoder's tensors.

    Args:
        folder: has adapter_config.json and adapter_model.safetensors or .bin.
        tensors: MLX name and unquantized shape of each tensor, by Hugging Face's name.
        present: MLX names of the tensors that the model has.

    Raises:
        UserError: the adapter is damaged, does not fit, or changes more than linear layers.
    """
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
            cause = "the merge would change all places that share its weight; train without it"
            raise UserError(f"{CONFIG}: LoRA on {layer} cannot be merged, even by PEFT: {cause}")
        if layer.rpartition(".")[2] in OTHERS:
            raise UserError(f"{CONFIG}: LoRA on {layer} cannot be merged here; merge it with PEFT")
    if not targets:
        raise UserError(f"{folder / CONFIG}: its target_modules name no layer of this model")
    weights, _ = read_weights(folder, WEIGHTS)
    matrices: dict[str, LowRank] = {}
    for layer in targets:
        path, (outputs, inputs) = layers[layer]
        expected: dict[str, Shape] = {
            "lora_A.weight": (config.r, inputs),
            "lora_B.weight": (outputs, config.r),
        }
        if config.use_dora:
            expected["lora_magnitude_vector"] = (outputs,)
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
            raise UserError(f"the adapter does not fit this model: unexpected {brief(name)}")
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
    named = {}
    for layer, arrays in tensors.items():
        for name, array in arrays.items():
            suffix = _WEIGHT if array.ndim == 2 else ""
            named[f"{_PREFIX}{layer}.{name}{suffix}"] = array.astype(mx.float32)
    with new_folder(path, overwrite) as partial:
        mx.save_safetensors(str(partial / WEIGHTS[0]), named, {"format": "pt"})
        config = {"peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM"} | dict(entries)
        if template := config.pop("translation_prefix", ""):
            write_json(partial / TRANSLATION, {"translation_prefix": template})
        write_json(partial / CONFIG, config)
    return path
