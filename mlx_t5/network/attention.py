"""Attention over the keys of a batch at once, or over those of each row alone.

Symbols: B rows, H heads, T queries a row, N keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mlx_t5.backend import mx
from mlx_t5.network import blocks
from mlx_t5.network.cache import round_up


@dataclass(frozen=True)
class ByRow:
    """Keys or values of rows that are attended to one at a time, each in a shape of its own.

    Attributes:
        arrays: (1, H, N, d_kv) of each row, where every row has its own N.
        batch: B; rows behind the last of `arrays` are padding.
        offsets: position of each row's first query, for self-attention; None for cross-attention.
    """

    arrays: list[mx.array]
    batch: int
    offsets: list[int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, N of the longest row, d_kv)."""
        _, heads, _, width = self.arrays[0].shape
        return self.batch, heads, max(array.shape[2] for array in self.arrays), width


Keys: TypeAlias = mx.array | ByRow


def attention(
    queries: mx.array, keys: Keys, values: Keys, mask: mx.array | blocks.Blocks | None
) -> mx.array:
    """Attention without scale.

    Args:
        queries: (B, H, T, d_kv).
        keys: (B, H, N, d_kv), or those of each row.
        values: likewise.
        mask: (B, H, T, N) or what broadcasts to it, added to the scores; None if all is seen.

    Returns:
        (B, H, T, d_kv), zeros where a row is padding.
    """
    if isinstance(keys, mx.array) or isinstance(values, mx.array):
        return blocks.attention(queries, keys, values, mask)
    assert not isinstance(mask, blocks.Blocks), "those are for the encoder"
    rows = []
    for i, (k, v) in enumerate(zip(keys.arrays, values.arrays, strict=True)):
        query, nearest = queries[i : i + 1], keys.offsets[i] if keys.offsets else None
        if mask is None or nearest is None:
            rows.append(attention(query, k, v, None))
        else:
            rows.append(_of_row(query, k, v, mask[i : i + 1], nearest))
    rows.append(mx.zeros((keys.batch - len(rows), *rows[0].shape[1:]), rows[0].dtype))
    return mx.concatenate(rows)


def _of_row(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, offset: int
) -> mx.array:
    """Self-attention of one row, in which a query at position p looks at round_up(p + 1) slots.

    More slots may change how a sum over them is rounded, although the others weigh nothing. So
    their number follows from the position alone, and not from the block the query came in.
    """

    def over(slots: int) -> mx.array:
        return blocks.attention(
            queries, keys[:, :, :slots], values[:, :, :slots], mask[..., :slots]
        )

    near, last = round_up(offset + 1), offset + queries.shape[2]
    out, far = over(near), round_up(last)
    if far == near:
        return out
    inside = near - offset  # queries that look no further
    return mx.concatenate([out[:, :, :inside], over(far)[:, :, inside:]], axis=2)
