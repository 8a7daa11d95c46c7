"""Limits on a checkpoint, checked before anything is computed from it.

With these limits a small, hostile file is refused fast. For comparison, t5-11b has about 510
tensors of at most two dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_TENSORS = 1 << 15
MAX_RANK = 8


def natural(values: Sequence[object]) -> bool:
    """Returns whether there are at most `MAX_RANK` values, all integers from 0 to 2**63 - 1."""
    return len(values) <= MAX_RANK and all(type(n) is int and 0 <= n < 1 << 63 for n in values)
