"""Encoding long sources by the block, so that memory does not grow with the square of their length.

The bias of an encoder's layer has B · H · S · S numbers: 4 GB in float32 for a source of 4,096
tokens and 64 heads. Attention of one query does not depend on the others, so the queries are taken
a block at a time, each with its own part of the bias, which is made anew in every layer.

Symbols: B rows, H heads, S source positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlx_t5.backend import mx

MAX_SCORES = 1 << 25  # numbers of a bias that are held at once: 128 MB in float32
LEAST_QUERIES = 32  # of a block, however long the source; fewer would not be fast anywhere


def block_queries(rows: int, heads: int, source: int) -> int:
    """How many queries a block has; S if the whole bias is small enough."""
    fitting = MAX_SCORES // (rows * heads * source)
    return source if fitting >= source else max(LEAST_QUERIES, fitting)


class Blocks:
    """The bias of one layer, block by block."""

    def __init__(self, source: int, queries: int, make: Callable[[mx.array], mx.array]) -> None:
        """Cuts a source.

        Args:
            source: S.
            queries: of a block.
            make: the bias (B, H, T, S) of queries at positions (1, T).
        """
        self._source, self._queries, self._make = source, queries, make

    def __iter__(self) -> Iterator[tuple[slice, mx.array]]:
        """The positions of each block's queries, and their bias."""
        for start in range(0, self._source, self._queries):
            end = min(start + self._queries, self._source)
            yield slice(start, end), self._make(mx.arange(start, end)[None])


def attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | Blocks | None) -> mx.array:
    """Attention (B, H, T, d_kv) without scale; `mask` is added to the scores (B, H, T, N)."""
    if not isinstance(mask, Blocks):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    parts = []
    for part, bias in mask:
        out = mx.fast.scaled_dot_product_attention(q[:, :, part], k, v, scale=1.0, mask=bias)
        mx.eval(out)  # what is only described is allocated ahead, several blocks of it
        parts.append(out)
    return mx.concatenate(parts, axis=2)
