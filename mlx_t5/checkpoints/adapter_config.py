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
from types import MappingProxyType
from typing import Any

from mlx_t5.disk import absolute, read_object
from mlx_t5.errors import UserError, shown
from mlx_t5.settings import FLAG, Range, checked, refusal

CONFIG = "adapter_config.json"
# Layers that cannot be adapted: those that are not linear, and the output head. For the head, PEFT
# also saves the base weight, and the head may be tied to the embedding.
OTHERS = ("shared", "embed_tokens", "relative_attention_bias", "lm_head")
ALL_LINEAR = "all-linear"
_MAX_NAMES = 4096  # names in a list; t5-11b has 384 linear layers
_NUMBERS: Mapping[str, Range] = MappingProxyType(
    {
        "r": Range(int, 1, 1 << 16, "a whole number from 1 to 65536"),
        "lora_alpha": Range(float, -1e6, 1e6, "a number from -1000000 to 1000000"),
        "use_rslora": FLAG,
        "use_dora": FLAG,
    }
)
_MODULES = ("target_modules", "exclude_modules")
_PATTERNS = ("rank_pattern", "alpha_pattern", "layers_pattern", "layers_to_transform")
# Initializations that do not affect how a trained adapter is merged.
_NEUTRAL_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")
# Entries about the adapter's training and origin, which do not affect merging. `fan_in_fan_out` has
# no effect either: PEFT turns it off for layers that store no transposed weight, such as T5's.
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "fan_in_fan_out inference_mode loftq_config lora_dropout lora_ga_config megatron_config "
    "peft_version revision runtime_config task_type".split()
)
_KNOWN = _WITHOUT_EFFECT | {"peft_type", "bias", "init_lora_weights", *_NUMBERS, *_MODULES}


def adapter_folder(name: str | Path) -> Path:
    """Returns the absolute path of the adapter folder that a user has named.

    Raises:
        UserError: there is no such folder.
    """
    folder = absolute(name)
    if not name or not folder.is_dir():
        raise UserError(f"there is no adapter folder {str(name)!r}; give a PEFT adapter's folder")
    return folder


@dataclass(frozen=True)
class LoraConfig:
    """The supported entries of an adapter's configuration; see PEFT's class of this name.

    LoRA adds a multiple of B @ A to a weight of shape (out, in); B is (out, r) and A is (r, in).

    Attributes:
        r: the rank: the number of columns of B and of rows of A.
        lora_alpha: the strength: B @ A is multiplied by lora_alpha / r.
        use_rslora: whether B @ A is multiplied by lora_alpha / sqrt(r) instead.
        use_dora: whether each row of a changed weight is then scaled to a learned length (DoRA).
        target_modules: the names of the layers to change, or the ends of their names, such as
            "q" or "SelfAttention.q"; or `ALL_LINEAR`, all linear layers but the output head.
        exclude_modules: the names, or ends of names, of layers that stay unchanged.
    """

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: str | tuple[str, ...] = ("q", "v")  # PEFT's default for T5
    exclude_modules: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Reads an adapter's configuration.

        Raises:
            UserError: the configuration is missing or damaged, or the adapter cannot be merged.
        """
        return cls.from_dict(read_object(folder / CONFIG, "give the folder of a PEFT adapter"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Returns the configuration, given the entries of adapter_config.json; skips null entries.

        Raises:
            UserError: the adapter is not a LoRA or cannot be merged, or an entry is malformed.
        """
        raw = {name: value for name, value in raw.items() if value is not None}
        _refuse_others(raw)
        entries: dict[str, Any] = {
            name: checked(f"{CONFIG}: {name}", raw[name], allowed)
            for name, allowed in _NUMBERS.items()
            if name in raw
        }
        entries |= {name: _names(name, raw[name]) for name in _MODULES if name in raw}
        return cls(**entries)

    @property
    def scale(self) -> float:
        """The factor by which LoRA's product B @ A is multiplied before it is added to a weight."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def targets(self, layers: Iterable[str]) -> list[str]:
        """Returns the layers that the adapter changes; `layers` are all layers, by full name."""
        return [
            layer
            for layer in layers
            if not _is_named(layer, self.exclude_modules)
            and (
                layer.rpartition(".")[2] not in OTHERS
                if self.target_modules == ALL_LINEAR
                else _is_named(layer, self.target_modules)
            )
        ]


def _is_named(layer: str, names: Iterable[str]) -> bool:
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _refuse_others(raw: Mapping[str, Any]) -> None:
    """Raises `UserError` if an entry asks for more than LoRA or DoRA of linear layers."""
    kind = raw.get("peft_type")
    if kind is None:
        raise UserError(f"{CONFIG} has no peft_type; only adapters saved by PEFT can be merged")
    if kind != "LORA":
        raise _refused("peft_type", kind)
    bias = raw.get("bias", "none")
    if bias == "all":
        raise _refused("bias", bias)  # T5's tables of relative positions have one
    if bias not in ("none", "lora_only"):  # T5's linear layers have none
        raise refusal(f"{CONFIG}: bias", bias, "none, lora_only or all")
    start = raw.get("init_lora_weights", True)
    if (start.lower() if isinstance(start, str) else start) not in _NEUTRAL_STARTS:
        raise _refused("init_lora_weights", start)  # it may change the base model as well
    for name, value in raw.items():
        if name in _PATTERNS and value not in ([], {}, ""):
            raise _refused(name, value)
        # An unknown number or text is harmless; a flag, a list or an object may enable a feature.
        asks = value is True or (isinstance(value, (list, dict)) and len(value) > 0)
        if asks and name not in _KNOWN:
            raise _refused(name, value)


def _refused(name: str, value: object) -> UserError:
    what = f"{CONFIG}: {shown(name)} {shown(value)} cannot be merged here"
    return UserError(f"{what}; merge it with PEFT, where PEFT can")


def _names(name: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if name == "target_modules" and value.lower() == ALL_LINEAR:
            return ALL_LINEAR
        raise _refused(name, value)  # a regular expression
    listed = isinstance(value, list) and len(value) <= _MAX_NAMES
    if not listed or not all(isinstance(item, str) for item in value):
        raise refusal(f"{CONFIG}: {name}", value, f"a list of at most {_MAX_NAMES} names")
    return tuple(value)
