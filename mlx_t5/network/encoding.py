"""Encodes sources, and computes a decoder's cache: keys and values of cross-attention.

Symbols: B rows, S source positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_t5.backend import mx
from mlx_t5.grouping import PASS_POSITIONS, by_length
from mlx_t5.network.cache import source_width
from mlx_t5.text.prompts import HIDDEN

if TYPE_CHECKING:
    from mlx_t5.model import T5
    from mlx_t5.network.cache import Cache
    from mlx_t5.network.interface import Target


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[mx.array, mx.array | None]:
    """Right-pads token lists: ids (rows, S), and a bool mask or None if no token is hidden."""
    width = source_width(max(map(len, rows)), len(rows))
    ids = mx.array([list(row) + [HIDDEN] * (width - len(row)) for row in rows], mx.int32)
    if all(len(row) == width and HIDDEN not in row for row in rows):
        return ids, None
    mask = ids != HIDDEN
    return mx.where(mask, ids, pad), mask


def encoder_states(model: Target, sources: Sequence[Sequence[int]]) -> list[mx.array]:
    """Returns the encoder's output (S, d_model) for each source of S tokens, lazily.

    Equal sources are encoded once. Sources of similar length share a pass, so there is little
    padding; `PASS_POSITIONS` limits a pass, so memory does not grow with the number of sources.
    """
    distinct = list(dict.fromkeys(map(tuple, sources)))
    states: dict[tuple[int, ...], mx.array] = {}
    for places in by_length(list(map(len, distinct)), len(distinct), PASS_POSITIONS):
        group = [distinct[i] for i in places]
        encoded = model.encode(*padded(group, model.config.pad_token_id))
        unpadded = [encoded[i, : len(source)] for i, source in enumerate(group)]
        mx.async_eval(unpadded)
        states |= zip(group, unpadded, strict=True)
    return [states[tuple(source)] for source in sources]


def make_cache(
    model: Target, sources: Sequence[Sequence[int]], states: Sequence[mx.array], beams: int = 1
) -> Cache:
    """A decoder's cache for encoded sources, lazily; equal sources are computed once."""
    keys = [tuple(source) for source in sources]
    distinct = dict(zip(keys, states, strict=True))
    ids, mask = padded(list(distinct), model.config.pad_token_id)
    encoded = [mx.pad(x, ((0, ids.shape[1] - len(x)), (0, 0))) for x in distinct.values()]
    cache = model.cache(mx.stack(encoded), mask)
    if len(distinct) < len(keys):
        rows = {key: row for row, key in enumerate(distinct)}
        cache.filter([rows[key] for key in keys])
    return cache if beams == 1 else cache.shared(beams, 1)


def cache_of(
    model: T5, sources: Sequence[Sequence[int]], states: Sequence[mx.array] | None = None
) -> Cache:
    """A decoder's cache with a row for each source; waits until it is computed."""
    cache = make_cache(model, sources, states or encoder_states(model, sources))
    mx.eval(cache.state)
    return cache
