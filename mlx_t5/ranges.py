"""Checks values of settings for the Python API, the command lines and the server.

Nothing here imports MLX, so that a command line can check its options before MLX is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from mlx_t5.errors import UserError, shown

# The normal numbers of float32. Smaller numbers lose digits, and GPUs replace them by 0.
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# Factors from 1 / LARGEST_FACTOR to LARGEST_FACTOR never make a logit infinite.
LARGEST_FACTOR = 1e30
LARGEST_COUNT = 2**31 - 1  # the largest int32, more than any number of tokens or ids
MAX_ROWS = 1024  # rows decoded at the same time; more make steps slower, and rows start later
VALUE_CHARACTERS = 60  # characters of a value in an error


@dataclass(frozen=True)
class Range:
    """The valid values of a setting.

    Attributes:
        kind: int, float or bool. For float, ints are valid too. A bool is never a number.
        least: the smallest valid value; smaller values are errors.
        most: the largest valid value; larger values are errors.
        expected: the end of the error message, after "it must be".
        besides: further valid values, outside this range.
        floor: a valid value below `floor` is accepted but raised to `floor`.
        ceiling: a valid value above `ceiling` is accepted but lowered to `ceiling`.
    """

    kind: type
    least: float
    most: float
    expected: str
    besides: tuple[Any, ...] = ()
    floor: float = -math.inf
    ceiling: float = math.inf

    def fit(self, value: Any) -> Any:
        """Returns a valid value as a plain Python value; None if the value is not valid.

        A number is converted to `kind`, and clamped to `floor` and `ceiling`.
        """
        if getattr(value, "ndim", None) == 0:  # a NumPy or MLX scalar
            value = value.item()
        if isinstance(value, str):
            return value if value in self.besides else None
        if isinstance(value, bool) or self.kind is bool:
            return value if isinstance(value, bool) and self.kind is bool else None
        numbers: Any = Integral if self.kind is int else Real
        if not isinstance(value, numbers):
            return None
        if not self.least <= value <= self.most:
            return self.kind(value) if value in self.besides else None
        return self.kind(min(max(self.kind(value), self.floor), self.ceiling))

    def holds(self, value: Any) -> bool:
        """Returns whether the value is valid."""
        return self.fit(value) is not None


def count_range(least: int, expected: str, ceiling: float = LARGEST_COUNT, **more: Any) -> Range:
    """Returns a `Range` of integers from `least` on; integers above `ceiling` become `ceiling`."""
    return Range(int, least, math.inf, expected, ceiling=ceiling, **more)


FLAG = Range(bool, 0, 1, "True or False")
POSITIVE = count_range(1, "a whole number, at least 1")
OFF_OR_MORE = count_range(0, "a whole number, 0 (off) or more")
BATCH_SIZE = count_range(1, POSITIVE.expected, ceiling=MAX_ROWS)
NUM_SAMPLES = count_range(1, POSITIVE.expected, ceiling=math.inf)
SEED = Range(int, 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1")
_OF_A_CALL = MappingProxyType({"batch_size": BATCH_SIZE, "num_samples": NUM_SAMPLES, "seed": SEED})


def checked(name: str, value: Any, allowed: Range | None = None) -> Any:
    """Returns a setting's value as a plain Python value, after checking it.

    Args:
        name: the setting's name.
        value: the caller's value.
        allowed: its range; None for batch_size, num_samples and seed, whose ranges are known here.

    Raises:
        UserError: the value is not valid.
    """
    allowed = allowed or _OF_A_CALL[name]
    fitting = allowed.fit(value)
    if fitting is None:
        raise refusal(name, value, allowed.expected)
    return fitting


def refusal(name: str, value: Any, expected: str) -> UserError:
    """Returns the error for a value that is not valid."""
    return UserError(f"{name} is {written(value)}; it must be {expected}")


def written(value: Any) -> str:
    """Returns a value's repr for an error message, shortened."""
    try:
        text = repr(value)
    except Exception:  # such as an integer with too many digits for Python to print
        text = f"too large an {type(value).__name__} to be shown"
    return shown(text, VALUE_CHARACTERS)


def is_listlike(value: Any) -> bool:
    """Returns whether a value is an iterable, but no string, bytes, dict or 0-dimensional array."""
    single = isinstance(value, (str, bytes, bytearray, Mapping))
    return isinstance(value, Iterable) and not single and getattr(value, "ndim", 1) > 0


def listed(value: Any) -> list | None:
    """Returns an iterable's items as a list; None if the value is not list-like."""
    if not is_listlike(value):
        return None
    return value.tolist() if hasattr(value, "tolist") else list(value)
