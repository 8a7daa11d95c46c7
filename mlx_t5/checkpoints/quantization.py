"""Quantizes models: decides how each layer is quantized, and quantizes a few rows at a time.

Each row is cut into groups of values. A group is stored with a few bits per value and with
parameters that its values share. In mode `affine` these parameters are a scale and an
offset in the model's type. In `mxfp4`, `mxfp8` (the OCP microscaling formats) and `nvfp4` the only
parameter is an 8-bit scale. A group lies within one row, so each row can be quantized by itself.

A recipe decides how each layer is quantized. Quantizing attention's values and outputs (`v` and
`o`) harms T5 most, so the recipe `vo_4_5` gives these layers more bits. The recipe `embed_8` also
quantizes the embedding and the output head, to 8 bits; `embed_8` is the default for vocabularies of
at least `LARGE_VOCABULARY` tokens. docs/converting.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from mlx_t5.backend import mx, nn
from mlx_t5.errors import UserError, reason

# mode -> (supported bits, supported group sizes); mlx-lm's defaults come first
MODES = MappingProxyType(
    {
        "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
        "mxfp4": ((4,), (32,)),
        "mxfp8": ((8,), (32,)),
        "nvfp4": ((4,), (16,)),
    }
)
# mlx-lm's recipes `mixed_A_B` differ from vo_A_B: they give B bits to the output head and, at some
# depths only, to `v` and the feed-forward's output layer.
VO_4_5 = "vo_4_5"  # 4 bits in most layers, 5 in attention's `v` and `o`
EMBED_8 = "embed_8"  # 8 bits in the embedding and the output head, any bits in other layers
LAYERS = "layers"  # attention and feed-forward only, even if the vocabulary is large
PREDICATES = (VO_4_5, EMBED_8, f"{VO_4_5}+{EMBED_8}", LAYERS)
LARGE_VOCABULARY = 100_000  # tokens; with fewer, the head is a small part of what a pass reads
_VALUES_AND_OUTPUTS = frozenset("vo")
_EMBEDDING_AND_HEAD = frozenset(("shared", "lm_head"))
_LAYERS = frozenset(("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"))
PARTS = ("weight", "scales", "biases")  # the names of nn.QuantizedLinear's arrays


def quantize_predicate(path: str, module: nn.Module | None = None) -> bool:
    """Returns whether a layer is part of attention or feed-forward, which every recipe quantizes.

    Args:
        path: the layer's path in the model.
        module: unused; it is here because `nn.quantize` passes the layer to its predicate.
    """
    return path.rsplit(".", 1)[-1] in _LAYERS


@dataclass(frozen=True)
class Quantization:
    """The settings of a quantization, named as in the entry `quantization` of config.json."""

    group_size: int
    bits: int
    mode: str

    @classmethod
    def from_options(
        cls, bits: int | None = None, group_size: int | None = None, mode: str = "affine"
    ) -> Quantization:
        """Returns the quantization for these options; None stands for a mode's default.

        Raises:
            UserError: the mode does not exist, or does not support these bits or this group size.
        """
        if mode not in MODES:
            raise UserError(f"unknown quantization mode {mode!r}; known: {', '.join(MODES)}")
        for value, known, flag in zip(
            (bits, group_size), MODES[mode], ("--q-bits", "--q-group-size"), strict=True
        ):
            if value is not None and value not in known:
                choices = ", ".join(map(str, sorted(known)))
                raise UserError(f"{flag} {value} does not exist in mode {mode}; choose {choices}")
        return cls(group_size or MODES[mode][1][0], bits or MODES[mode][0][0], mode)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a weight can be quantized: whether its rows divide into whole groups."""
        return len(shape) == 2 and shape[-1] % self.group_size == 0

    def quantize(self, name: str, rows: mx.array) -> dict[str, mx.array]:
        """Quantizes rows of a weight.

        Args:
            name: the weight's name, ending in `.weight`.
            rows: n rows of the weight; in mode affine, scales and offsets get the type of the rows.

        Returns:
            Arrays of n rows, keyed by name. The names end in `.weight` (the values, packed in
            uint32), `.scales` and, in mode affine only, `.biases` (the offsets).
        """
        arrays = mx.quantize(rows, group_size=self.group_size, bits=self.bits, mode=self.mode)
        path = name.removesuffix("weight")
        return {path + part: array for part, array in zip(PARTS, arrays, strict=False)}


@dataclass(frozen=True)
class Recipe:
    """The quantization of each layer of a model.

    Attributes:
        general: the quantization of attention and feed-forward.
        special: the quantization of attention's layers `v` and `o`; None if `general` applies.
        embedding: the quantization of the embedding and of an output head that is not tied to it;
            None leaves both unquantized.
    """

    general: Quantization
    special: Quantization | None = None
    embedding: Quantization | None = None

    @classmethod
    def from_options(
        cls,
        bits: int | None = None,
        group_size: int | None = None,
        mode: str = "affine",
        predicate: str | None = None,
        vocab_size: int = 0,
    ) -> Recipe:
        """Returns the recipe for these options.

        Args:
            bits: bits of all layers except the embedding and the head; None is the mode's default.
            group_size: group size; None is the mode's default. In modes other than affine, the
                embedding and the head always get affine's default.
            mode: mode of all layers except the embedding and the head, which are always affine.
            predicate: one of `PREDICATES`; `VO_4_5` sets bits and mode itself. None is `EMBED_8`
                for `LARGE_VOCABULARY` tokens or more, and otherwise `LAYERS`.
            vocab_size: the number of tokens in the model's vocabulary.

        Raises:
            UserError: an option is unknown, or the options cannot be combined.
        """
        if predicate is not None and predicate not in PREDICATES:
            known = ", ".join(PREDICATES)
            raise UserError(f"unknown --quant-predicate {predicate!r}; known: {known}")
        if predicate is None and vocab_size >= LARGE_VOCABULARY:
            predicate = EMBED_8
        embedding, parts = None, predicate.split("+") if predicate else []
        if EMBED_8 in parts:
            embedding = Quantization.from_options(8, group_size if mode == "affine" else None)
        if VO_4_5 not in parts:
            return cls(Quantization.from_options(bits, group_size, mode), embedding=embedding)
        if bits is not None or mode != "affine":
            wrong = "--q-bits" if bits is not None else f"--q-mode {mode}"
            raise UserError(f"{VO_4_5} says bits and mode itself; leave {wrong} out")
        four, five = (Quantization.from_options(bits, group_size) for bits in (4, 5))
        return cls(four, five, embedding)

    def wanted(self, path: str) -> Quantization | None:
        """Returns a layer's intended quantization, or None; the layer's shape does not matter."""
        if path in _EMBEDDING_AND_HEAD:
            return self.embedding
        if not quantize_predicate(path):
            return None
        sensitive = path.rsplit(".", 1)[-1] in _VALUES_AND_OUTPUTS
        return self.special if self.special and sensitive else self.general

    def for_layer(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """Returns a parameter's quantization; None if none is intended or the shape forbids it."""
        how = self.wanted(name.removesuffix(".weight"))
        return how if how and how.fits(shape) else None

    def entry(self, layers: dict[str, Quantization]) -> dict:
        """Returns the entry `quantization` of config.json.

        The entry has the fields of the general quantization. A layer that is quantized differently
        has fields of its own, keyed by the layer's path.

        Args:
            layers: the quantization of every quantized layer, keyed by path.
        """
        special = {path: asdict(how) for path, how in layers.items() if how != self.general}
        return asdict(self.general) | special


def layer_settings(entry: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns a layer's group_size, bits and mode, as far as config.json has them.

    Args:
        entry: the entry `quantization` of config.json; see `Recipe.entry`.
        path: the layer's path.
    """
    own = entry.get(path)
    settings = own if isinstance(own, Mapping) else entry
    return {name: settings[name] for name in ("group_size", "bits", "mode") if name in settings}


def changed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns new settings, given the old ones, for a quantized layer that an adapter has changed.

    The layer gets 8 bits, because fewer bits would round away much of the adapter's change.
    """
    return {"group_size": max(32, settings.get("group_size", 64)), "bits": 8, "mode": "affine"}


def change_weight(
    path: str,
    arrays: Mapping[str, mx.array],
    settings: Mapping[str, Any],
    change: Callable[[mx.array], mx.array],
) -> dict[str, mx.array]:
    """Changes the weight of a layer; if the layer is quantized, quantizes the result again.

    Args:
        path: the layer's path.
        arrays: the layer's arrays by name: the weight, or for a quantized layer all the arrays that
            `Quantization.quantize` returns.
        settings: the settings with which `arrays` are quantized, from `layer_settings`.
        change: a function that takes a floating-point weight (out, in) and returns the changed one.

    Returns:
        The layer's arrays by name. A quantized layer gets the settings of `changed_settings`.

    Raises:
        UserError: the arrays cannot be dequantized with these settings.
    """
    weight, scales, offsets = (arrays.get(f"{path}.{part}") for part in PARTS)
    if scales is None:
        return {f"{path}.weight": change(weight)}
    if offsets is not None:  # mode affine; in the other modes the scales are exact in any type
        scales, offsets = scales.astype(mx.float32), offsets.astype(mx.float32)
    try:
        plain = mx.dequantize(weight, scales, offsets, **settings)
    except ValueError as error:
        cause = f"{path} cannot be dequantized ({reason(error)})"
        raise UserError(f"{cause}: fetch the model again") from None
    parts = mx.quantize(change(plain), **changed_settings(settings))
    return {f"{path}.{part}": array for part, array in zip(PARTS, parts, strict=False)}
