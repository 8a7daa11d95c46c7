"""Limits on a checkpoint, checked before anything is computed from it.

So a small, hostile file is refused fast. t5-11b has 560 tensors of at most two dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_TENSORS = 1 << 15
MAX_RANK = 8


def natural(values: Sequence[object]) -> bool:
    """Whether values can be the shape, strides or offsets of a tensor."""
    return len(values) <= MAX_RANK and all(type(n) is int and 0 <= n < 1 << 63 for n in values)
