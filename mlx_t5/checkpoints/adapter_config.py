"""Which layers a LoRA adapter changes and by how much, as PEFT's adapter_config.json says it.

The entries are those of PEFT's `LoraConfig`, and mean what they mean in PEFT 0.21. What would make
the adapter something else than a product of two matrices a layer, with DoRA or without, is refused
by its name: an adapter that is merged in part would be another model that still writes fluent text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_t5.checkpoints.adapter_patterns import (
    ANY_BLOCK,
    BLOCK,
    CONFIG,
    ENDING,
    WHOLE,
    Matches,
    Pattern,
    matches,
)
from mlx_t5.checkpoints.small_files import place, read_object
from mlx_t5.errors import UserError, shown
from mlx_t5.ranges import FLAG, Range, checked, refusal

# No linear layers; the head is one, but PEFT saves its base as well, and it may be the embedding.
OTHERS = ("shared", "embed_tokens", "relative_attention_bias", "lm_head")
ALL_LINEAR = "all-linear"
Check = Callable[[str, Any], Any]  # gets an entry's name and value, and returns what it means
_MAX_NAMES = 4096  # in a list; t5-11b has 560 layers
_MAX_PATTERN = 1000  # characters
_RANK = Range(int, 1, 1 << 16, "a whole number from 1 to 65536")
_ALPHA = Range(float, -1e6, 1e6, "a number from -1000000 to 1000000")


# What the first weights were changes nothing afterwards.
_NEUTRAL_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")
_CONVERTIBLE_STARTS = ("pissa", "corda", "olora", "lora_ga")
# Whatever they hold, a merged adapter is the same: how it was trained, and where it came from. That
# weights are transposed (fan_in_fan_out) is never true of T5's layers, and PEFT goes by these.
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "fan_in_fan_out inference_mode loftq_config lora_dropout lora_ga_config megatron_config "
    "peft_version revision runtime_config task_type".split()
)


def adapter_folder(name: str | Path) -> Path:
    """The folder of an adapter.

    Raises:
        UserError: there is none of that name.
    """
    folder = place(name)
    if not name or not folder.is_dir():
        raise UserError(f"there is no adapter folder {str(name)!r}; give that of a PEFT adapter")
    return folder


@dataclass(frozen=True)
class Change:
    """What an adapter does to a layer's weight W: W + scale · B @ A, before DoRA.

    Attributes:
        rank: rows of A, columns of B.
        scale: as it stands there.
    """

    rank: int
    scale: float


@dataclass(frozen=True)
class LoraConfig:
    """The entries that count; see PEFT's class of this name.

    Attributes:
        r: rank of layers that `rank_pattern` does not name.
        lora_alpha: strength of layers that `alpha_pattern` does not name.
        use_rslora: whether the strength is divided by the root of the rank and not by the rank.
        use_dora: whether the rows of a changed weight have lengths of their own.
        rank_pattern: rank by pattern of the end of names.
        alpha_pattern: strength by pattern.
        target_modules: ends of names, or one pattern of whole names.
        exclude_modules: likewise; these are left as they are.
        layers_to_transform: if not empty, blocks to which a list of `target_modules` is limited.
        layers_pattern: what precedes a block's number; empty for any name.
    """

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | tuple[str, ...] = ("q", "v")  # PEFT's for T5
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Reads an adapter's configuration.

        Raises:
            UserError: there is none, it is damaged, or asks for what cannot be merged.
        """
        return cls.from_dict(read_object(folder / CONFIG, "give the folder of a PEFT adapter"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Reads what adapter_config.json holds; null counts as absent.

        Raises:
            UserError: it is no LoRA, asks for what cannot be merged, or an entry is malformed.
        """
        raw = {name: value for name, value in raw.items() if value is not None}
        _refuse_others(raw)
        _refuse_unused_blocks(raw)
        return cls(
            **{name: read(name, raw[name]) for name, read in _ENTRIES.items() if name in raw}
        )

    def changes(self, layers: Iterable[str]) -> dict[str, Change]:
        """What the adapter does to those of the layers, by their full names, that it changes.

        Raises:
            UserError: a pattern cannot be matched.
        """
        layers = list(layers)
        modules = [m for m in (self.target_modules, self.exclude_modules) if isinstance(m, str)]
        patterns = [(WHOLE, pattern) for pattern in modules]
        patterns += self._blocks() if self.layers_to_transform else []
        patterns += [(ENDING, p) for p in (*self.rank_pattern, *self.alpha_pattern)]
        matched = matches(patterns, layers)
        targets = [layer for layer in layers if self._is_target(layer, matched)]
        return {layer: self._change(layer, matched) for layer in targets}

    def _change(self, layer: str, matched: Matches) -> Change:
        # As in PEFT the first pattern counts.
        ranks = (r for p, r in self.rank_pattern.items() if layer in matched[ENDING, p])
        alphas = (a for p, a in self.alpha_pattern.items() if layer in matched[ENDING, p])
        rank, alpha = next(ranks, self.r), next(alphas, self.lora_alpha)
        return Change(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def _is_target(self, layer: str, matched: Matches) -> bool:
        targets = self.target_modules
        if _is_named(layer, self.exclude_modules, matched):
            return False
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            return layer.rpartition(".")[2] not in OTHERS
        if not _is_named(layer, targets, matched):
            return False
        # A layer's whole name counts whatever its block is.
        if isinstance(targets, str) or layer in targets or not self.layers_to_transform:
            return True
        block = next((matched[p][layer] for p in self._blocks() if layer in matched[p]), "")
        return block in map(str, self.layers_to_transform)

    def _blocks(self) -> list[Pattern]:
        """Patterns that find the number of the block that a layer lies in."""
        return [(BLOCK, name) for name in self.layers_pattern] or [(ANY_BLOCK, "")]


def _is_named(layer: str, modules: str | tuple[str, ...], matched: Matches) -> bool:
    """Whether a list has the layer's name or the end of it, or a pattern matches the whole."""
    if isinstance(modules, str):
        return layer in matched[WHOLE, modules]
    return any(layer == name or layer.endswith(f".{name}") for name in modules)


def _refuse_others(raw: Mapping[str, Any]) -> None:
    """Refuses what is no plain LoRA on linear layers, by its name."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        if kind is None:
            raise UserError(f"{CONFIG} has no peft_type; only adapters saved by PEFT can be merged")
        raise UserError(f"{CONFIG}: peft_type {shown(kind)} cannot be merged; only LORA can")
    bias = raw.get("bias", "none")
    if bias == "all":
        cause = "bias all means T5's tables of relative positions as well"
        raise UserError(f"{CONFIG}: {cause}, which cannot be merged here; merge it with PEFT")
    if bias not in ("none", "lora_only"):  # T5's linear layers have none
        raise refusal(f"{CONFIG}: bias", bias, "none, lora_only or all")
    _refuse_start(raw.get("init_lora_weights", True))
    for name, value in raw.items():
        # An entry unknown here may be a number or a name, which others refer to, but no switch.
        if name not in _CHECKED | _WITHOUT_EFFECT and (value is True or _holds(value)):
            what = f"{CONFIG}: {shown(name)} {shown(value)}"
            raise UserError(f"{what} cannot be merged here; merge it with PEFT, where PEFT can")


def _refuse_start(start: object) -> None:
    """Refuses first weights for which the base model was changed as well."""
    kind = start.lower() if isinstance(start, str) else start
    if any(kind is known or kind == known for known in _NEUTRAL_STARTS):
        return
    what = f"{CONFIG}: init_lora_weights {shown(start)}"
    if isinstance(kind, str) and kind.startswith(_CONVERTIBLE_STARTS):
        cure = "save the adapter with path_initial_model_for_weight_conversion"
        raise UserError(f"{what} changes the base model as well; {cure}")
    raise UserError(f"{what} cannot be merged here: it may change the base model as well")


def _refuse_unused_blocks(raw: Mapping[str, Any]) -> None:
    """Refuses what says which blocks are meant where, as in PEFT, nothing comes of it."""
    for name in ("layers_to_transform", "layers_pattern"):
        given = raw.get(name) not in (None, [], "")
        if given and isinstance(raw.get("target_modules"), str):
            raise UserError(f"{CONFIG}: {name} goes with a list of target_modules, not a pattern")
    if raw.get("layers_pattern") and raw.get("layers_to_transform") in (None, []):
        raise UserError(f"{CONFIG}: layers_pattern goes with layers_to_transform only")


def _holds(value: object) -> bool:
    return isinstance(value, (list, dict)) and len(value) > 0


def _one(allowed: Range) -> Check:
    return lambda name, value: checked(f"{CONFIG}: {name}", value, allowed)


def _several(kind: type, expected: str) -> Check:
    """One item or a list of them; an empty text is none."""

    def read(name: str, value: Any) -> tuple:
        items: Any = () if value == "" else [value] if type(value) is kind else value
        listed = isinstance(items, (list, tuple)) and len(items) <= _MAX_NAMES
        if not listed or not all(type(item) is kind for item in items):
            raise refusal(f"{CONFIG}: {name}", value, f"a list of at most {_MAX_NAMES} {expected}")
        return tuple(_short(name, item) if kind is str else item for item in items)

    return read


def _modules(name: str, value: Any) -> str | tuple[str, ...]:
    """One pattern of whole names, or a list of ends of names."""
    return _short(name, value) if isinstance(value, str) else _names(name, value)


def _by_pattern(allowed: Range) -> Check:
    def read(name: str, value: Any) -> dict:
        if not isinstance(value, dict) or len(value) > _MAX_NAMES:
            raise refusal(f"{CONFIG}: {name}", value, f"an object of at most {_MAX_NAMES} entries")
        return {_short(name, p): _one(allowed)(name, number) for p, number in value.items()}

    return read


def _short(name: str, pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN:
        expected = f"of at most {_MAX_PATTERN} characters a pattern"
        raise refusal(f"{CONFIG}: {name}", pattern, expected)
    return pattern


_names = _several(str, "names")
# What reads each attribute of `LoraConfig`.
_ENTRIES: Mapping[str, Check] = MappingProxyType(
    {
        "r": _one(_RANK),
        "lora_alpha": _one(_ALPHA),
        "use_rslora": _one(FLAG),
        "use_dora": _one(FLAG),
        "rank_pattern": _by_pattern(_RANK),
        "alpha_pattern": _by_pattern(_ALPHA),
        "target_modules": _modules,
        "exclude_modules": _modules,
        "layers_to_transform": _several(int, "whole numbers"),
        "layers_pattern": _names,
    }
)
_CHECKED = frozenset(("peft_type", "bias", "init_lora_weights", *_ENTRIES))
