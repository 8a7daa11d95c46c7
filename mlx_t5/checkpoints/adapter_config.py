"""Reads PEFT's adapter_config.json: which layers a LoRA adapter changes, and by how much.

The file's entries are those of `LoraConfig` in PEFT 0.21. LoRA, rank-stabilized LoRA and DoRA of
linear layers are supported. An entry that asks for anything else raises an error. Otherwise the
adapter would be merged only in part, and nobody would notice, because the text stays fluent. A
regular expression for the names of layers is refused too: a hostile one takes years to match.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.disk import absolute, read_object
from mlx_t5.errors import UserError, shown
from mlx_t5.installation import command
from mlx_t5.settings import FLAG, Range, checked

CONFIG = "adapter_config.json"
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


def adapter_folder(name: str | Path) -> Path:
    folder = absolute(name)
    if not name or not folder.is_dir():
        raise UserError(f"there is no adapter folder {str(name)!r}; give a PEFT adapter's folder")
    return folder


def translation_entry(adapter: str | Path | None) -> dict[str, Any]:
    """The `translation_prefix` that an adapter was trained with, an entry of config.json."""
    file = adapter_folder(adapter) / TRANSLATION if adapter is not None else None
    if file is None or not file.is_file():
        return {}
    return {"translation_prefix": read_object(file, "fetch it again").get("translation_prefix")}


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
            cure = f"train one with {command('finetune')} or PEFT"
            raise UserError(f"{CONFIG} is of an mlx-lm adapter, which is for other models; {cure}")
        if (kind := raw.get("peft_type")) != "LORA":
            raise UserError(f"{CONFIG}: peft_type {shown(kind)} cannot be merged; only LORA can")
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
                what = f"{CONFIG}: {shown(name)} {shown(value)} cannot be merged here"
                raise UserError(f"{what}; merge it with PEFT, where PEFT can")
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
