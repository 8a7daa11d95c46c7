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

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_t5.backend import mx, nn
from mlx_t5.checkpoints.recipes import EMBED_8, LARGE_VOCABULARY, LAYERS, MODES, PREDICATES, VO_4_5
from mlx_t5.errors import UserError

_LAYERS = frozenset(("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"))
PARTS = ("weight", "scales", "biases")  # the names of nn.QuantizedLinear's arrays
SETTINGS = ("group_size", "bits", "mode")  # its attributes, and the entries of config.json
MOST_LOST = 0.01  # of a layer's weights; if a mode would lose more, the layer takes another


def quantize_predicate(path: str, module: nn.Module | None = None) -> bool:
    """Whether a layer is part of attention or feed-forward; a predicate for `nn.quantize`."""
    return path.rsplit(".", 1)[-1] in _LAYERS


@dataclass(frozen=True)
class Quantization:
    """Settings named as in the entry `quantization` of config.json."""

    group_size: int
    bits: int
    mode: str

    @classmethod
    def from_options(
        cls, bits: int | None = None, group_size: int | None = None, mode: str = "affine"
    ) -> Quantization:
        if mode not in MODES:
            raise UserError(f"unknown quantization mode {mode!r}; known: {', '.join(MODES)}")
        supported = MODES[mode]
        for flag, value, known in (
            ("--q-bits", bits, supported[0]),
            ("--q-group-size", group_size, supported[1]),
        ):
            if value is not None and value not in known:
                choices = ", ".join(map(str, sorted(known)))
                raise UserError(f"{flag} {value} does not exist in mode {mode}; choose {choices}")
        return cls(group_size or supported[1][0], bits or supported[0][0], mode)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and shape[-1] % self.group_size == 0

    def lost(self, rows: mx.array, arrays: Sequence[mx.array]) -> float:
        """The part of the groups that is all zeros once quantized; 1 if anything is infinite."""
        restored = mx.dequantize(*arrays, **asdict(self))
        before, after = (mx.any(x.reshape(-1, self.group_size), axis=1) for x in (rows, restored))
        return mx.where(mx.all(mx.isfinite(restored)), mx.mean(before & ~after), 1).item()


@dataclass(frozen=True)
class Recipe:
    """How each layer of a model is quantized.

    Attributes:
        general: attention and feed-forward.
        special: attention's layers `v` and `o`; None if `general` applies.
        embedding: the embedding and an untied output head, always affine; None leaves both as is.
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
        """The recipe for convert.py's options; None stands for the mode's default."""
        if predicate is None:
            predicate = EMBED_8 if vocab_size >= LARGE_VOCABULARY else LAYERS
        if predicate not in PREDICATES:
            names = ", ".join(PREDICATES)
            raise UserError(f"unknown --quant-predicate {predicate!r}; known: {names}")
        embedding = None
        if EMBED_8 in predicate:
            embedding = Quantization.from_options(8, group_size if mode == "affine" else None)
        if VO_4_5 not in predicate:
            return cls(Quantization.from_options(bits, group_size, mode), embedding=embedding)
        if bits is not None or mode != "affine":
            wrong = "--q-bits" if bits is not None else f"--q-mode {mode}"
            raise UserError(f"{VO_4_5} says bits and mode itself; leave {wrong} out")
        four, five = (Quantization.from_options(bits, group_size) for bits in (4, 5))
        return cls(four, five, embedding)

    def requested(self, path: str) -> Quantization | None:
        if path in ("shared", "lm_head"):
            return self.embedding
        if not quantize_predicate(path):
            return None
        return self.special if self.special and path.endswith((".v", ".o")) else self.general

    def for_layer(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        how = self.requested(name.removesuffix(".weight"))
        return how if how and how.fits(shape) else None

    def entry(self, layers: dict[str, Quantization]) -> dict:
        """The entry `quantization` of config.json; layers that differ are keyed by their path."""
        special = {path: asdict(how) for path, how in layers.items() if how != self.general}
        return asdict(self.general) | special


def quantized(name: str, rows: mx.array, layers: dict[str, Quantization]) -> dict[str, mx.array]:
    """Quantizes a layer, in another mode or not at all if its own would make weights zero.

    Each mode has a smallest scale. That of nvfp4 is 2**-9, and T5's queries are small, as T5 does
    not scale attention: they start with a deviation of (d_model * d_kv)**-0.5, with which most of
    t5-11b's would become zero.

    Args:
        name: the weight's name.
        rows: the weight.
        layers: the settings of each layer by its weight's name; brought up to date.

    Returns:
        The layer's arrays by name: .weight and, if it is quantized, .scales and perhaps .biases.
    """
    how = layers.pop(name, None)
    for mode in (how, Quantization(32, 4, "mxfp4") if how and how.bits == 4 else None):
        if mode and mode.fits(rows.shape):
            arrays = mx.quantize(rows, **asdict(mode))
            if mode.lost(rows, arrays) <= MOST_LOST:
                layers[name] = mode
                path = name.removesuffix(PARTS[0])
                return {path + part: array for part, array in zip(PARTS, arrays, strict=False)}
    return {name: rows}


def changes(requested: dict, taken: dict, dtype: str) -> str:
    """A line about the layers that `quantized` left in `dtype` or in a mode not requested."""
    kinds = set()
    for name, how in requested.items():
        actual = taken.get(name)
        if actual != how:
            kind = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
            kinds.add(f"{kind} ({actual.mode if actual else dtype} instead of {how.mode})")
    return f"some weights would become zero: {', '.join(sorted(kinds))}\n" if kinds else ""


def layer_settings(entry: Mapping[str, Any], path: str) -> dict[str, Any]:
    own = entry.get(path)
    settings = own if isinstance(own, Mapping) else entry
    return {name: settings[name] for name in SETTINGS if name in settings}
