"""Quantises models: decides how each layer is quantised, and quantises a few rows at a time.

Each row is cut into groups of values. A group is stored with a few bits per value and with shared
parameters, which depend on the mode. `affine` has a scale and an offset in the model's type.
`mxfp4`, `mxfp8` (the OCP microscaling formats) and `nvfp4` have an 8-bit scale. Rows are quantised
independently, because a group lies within one row.

A recipe decides how each layer is quantised. T5 is most sensitive in attention's values and outputs
(`v` and `o`), so the recipe `vo_4_5` gives these more bits. The embedding and the output head are
quantised to 8 bits by the recipe `embed_8`, which is the default for `LARGE_VOCABULARY` tokens or
more. docs/converting.md has the figures.
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
# mlx-lm's recipes `mixed_A_B` differ from vo_A_B: they give B bits to the head and, at some depths
# only, to `v` and the feed-forward's output.
VO_4_5 = "vo_4_5"  # 4 bits in most layers, 5 in attention's `v` and `o`
EMBED_8 = "embed_8"  # 8 bits in the embedding and the output head, any bits in other layers
LAYERS = "layers"  # only attention and feed-forward, however large the vocabulary is
PREDICATES = (VO_4_5, EMBED_8, f"{VO_4_5}+{EMBED_8}", LAYERS)
LARGE_VOCABULARY = 100_000  # tokens; with fewer, the head is a small part of what a pass reads
_VALUES_AND_OUTPUTS = frozenset("vo")
_EMBEDDING_AND_HEAD = frozenset(("shared", "lm_head"))
_LAYERS = frozenset(("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"))
PARTS = ("weight", "scales", "biases")  # the names of nn.QuantizedLinear's arrays


def quantize_predicate(path: str, module: nn.Module | None = None) -> bool:
    """Returns whether a layer belongs to attention or feed-forward, which every recipe quantises.

    Args:
        path: the layer's name in the model.
        module: unused; `nn.quantize` passes it to its `class_predicate`.
    """
    return path.rsplit(".", 1)[-1] in _LAYERS


@dataclass(frozen=True)
class Quantization:
    """A quantisation's settings; the fields are those of `quantization` in config.json."""

    group_size: int
    bits: int
    mode: str

    @classmethod
    def from_options(
        cls, bits: int | None = None, group_size: int | None = None, mode: str = "affine"
    ) -> Quantization:
        """Returns the quantisation for these options; None is the mode's default.

        Raises:
            UserError: the mode does not exist, or does not support these bits or this group size.
        """
        if mode not in MODES:
            raise UserError(f"unknown quantisation mode {mode!r}; known: {', '.join(MODES)}")
        for value, known, flag in zip(
            (bits, group_size), MODES[mode], ("--q-bits", "--q-group-size"), strict=True
        ):
            if value is not None and value not in known:
                choices = ", ".join(map(str, sorted(known)))
                raise UserError(f"{flag} {value} does not exist in mode {mode}; choose {choices}")
        return cls(group_size or MODES[mode][1][0], bits or MODES[mode][0][0], mode)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a weight's rows divide into groups; otherwise it is not quantised."""
        return len(shape) == 2 and shape[-1] % self.group_size == 0

    def quantize(self, name: str, rows: mx.array) -> dict[str, mx.array]:
        """Quantises rows of a weight.

        Args:
            name: the weight's name, ending in `.weight`.
            rows: (n, columns); their type becomes the type of scales and offsets in mode affine.

        Returns:
            Arrays of n rows by their names, which end in `.weight` (the values, packed in uint32),
            `.scales` and, in mode affine only, `.biases` (the offsets).
        """
        arrays = mx.quantize(rows, group_size=self.group_size, bits=self.bits, mode=self.mode)
        path = name.removesuffix("weight")
        return {path + part: array for part, array in zip(PARTS, arrays, strict=False)}


@dataclass(frozen=True)
class Recipe:
    """The quantisation of each layer of a model.

    Attributes:
        general: quantisation of most layers.
        special: quantisation of attention's values and outputs; None uses `general`.
        embedding: quantisation of the embedding and a separate output head; None leaves them
            unquantised.
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
            group_size: group size of the layers; None is the mode's default.
            mode: mode of all layers except the embedding and the head, which are always affine.
            predicate: one of `PREDICATES`; `VO_4_5` sets bits and mode itself. None is `EMBED_8`
                for `LARGE_VOCABULARY` tokens or more, and otherwise `LAYERS`.
            vocab_size: the number of the model's tokens.

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
        """Returns the recipe's quantisation for a layer; None if the layer is not quantised."""
        if path in _EMBEDDING_AND_HEAD:
            return self.embedding
        if not quantize_predicate(path):
            return None
        sensitive = path.rsplit(".", 1)[-1] in _VALUES_AND_OUTPUTS
        return self.special if self.special and sensitive else self.general

    def for_layer(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """Returns the quantisation of a parameter; None if it stays as it is (see `fits`)."""
        how = self.wanted(name.removesuffix(".weight"))
        return how if how and how.fits(shape) else None

    def entry(self, layers: dict[str, Quantization]) -> dict:
        """Returns the entry `quantization` of config.json.

        It has the general quantisation, and by path the quantisation of layers that differ.

        Args:
            layers: the quantisation of every quantised layer, by path.
        """
        special = {path: asdict(how) for path, how in layers.items() if how != self.general}
        return asdict(self.general) | special


def layer_settings(entry: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns those of a layer's settings group_size, bits and mode that config.json has.

    Args:
        entry: the config's `quantization`, see `Recipe.entry`.
        path: the layer's path.
    """
    own = entry.get(path)
    settings = own if isinstance(own, Mapping) else entry
    return {name: settings[name] for name in ("group_size", "bits", "mode") if name in settings}


def changed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with which a quantised layer is stored after an adapter changed it.

    The layer gets 8 bits, because fewer bits would round away much of the adapter's change.
    """
    return {"group_size": max(32, settings.get("group_size", 64)), "bits": 8, "mode": "affine"}


def change_weight(
    path: str,
    arrays: Mapping[str, mx.array],
    settings: Mapping[str, Any],
    change: Callable[[mx.array], mx.array],
) -> dict[str, mx.array]:
    """Changes the weight of a layer; if the layer is quantised, quantises the result again.

    Args:
        path: the layer's path.
        arrays: the layer's arrays by name: the weight, and if the layer is quantised the other
            arrays of `Quantization.quantize`.
        settings: the layer's present settings, from `layer_settings`.
        change: a function that returns the changed floating-point weight (out, in).

    Returns:
        The layer's arrays by name; if the layer is quantised, they have `changed_settings`.

    Raises:
        UserError: the arrays cannot be dequantised with these settings.
    """
    weight, scales, offsets = (arrays.get(f"{path}.{part}") for part in PARTS)
    if scales is None:
        return {f"{path}.weight": change(weight)}
    if offsets is not None:  # mode affine; in the other modes the scales are exact in any type
        scales, offsets = scales.astype(mx.float32), offsets.astype(mx.float32)
    try:
        plain = mx.dequantize(weight, scales, offsets, **settings)
    except ValueError as error:
        cause = f"{path} cannot be dequantised ({reason(error)})"
        raise UserError(f"{cause}: fetch the model again") from None
    parts = mx.quantize(change(plain), **changed_settings(settings))
    return {f"{path}.{part}": array for part, array in zip(PARTS, parts, strict=False)}
