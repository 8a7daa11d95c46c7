"""Which quantisations MLX computes with, and a layer's weight quantised a few rows at a time.

A mode stores each group of values of a row with few bits a value and what the group has in common:
`affine` a scale and an offset in the model's type; `mxfp4`, `mxfp8` (the OCP microscaling formats)
and `nvfp4` an 8-bit scale. As groups lie within a row, rows can be quantised apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from backend import UserError, mx

# mode -> the (bits, group sizes) it knows, the defaults of mlx-lm first
MODES = MappingProxyType(
    {
        "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
        "mxfp4": ((4,), (32,)),
        "mxfp8": ((8,), (32,)),
        "nvfp4": ((4,), (16,)),
    }
)
_PARTS = ("weight", "scales", "biases")  # as nn.QuantizedLinear names them


@dataclass(frozen=True)
class Quantization:
    """One way to quantise; the fields are those of `quantization` in config.json."""

    group_size: int
    bits: int
    mode: str

    @classmethod
    def choose(
        cls, bits: int | None = None, group_size: int | None = None, mode: str = "affine"
    ) -> Quantization:
        """The wanted quantisation, what is None being the mode's default.

        Raises:
            UserError: MLX has no such combination.
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
        """Whether rows of this length divide into groups; if not, mlx-lm leaves the layer alone."""
        return len(shape) == 2 and shape[-1] % self.group_size == 0

    def overhead(self, width: int) -> int:
        """Bytes that each group takes besides its values, in a model of `width` bytes a number."""
        return 2 * width if self.mode == "affine" else 1

    def quantize(self, name: str, rows: mx.array) -> dict[str, mx.array]:
        """Quantises rows of a weight.

        Args:
            name: the weight's name, ending in `.weight`.
            rows: (n, columns), in the type that scales and offsets shall have.

        Returns:
            The arrays by their names: `.weight` (packed in uint32), `.scales` and in mode affine
            `.biases` (the offsets), each of n rows.
        """
        arrays = mx.quantize(rows, group_size=self.group_size, bits=self.bits, mode=self.mode)
        path = name.removesuffix("weight")
        return {path + part: array for part, array in zip(_PARTS, arrays, strict=False)}
