"""Encodes sources in groups of similar length, and computes a decoder's cache of them.

Symbols: B rows, S source positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from mlx_t5.backend import mx
from mlx_t5.network.cache import source_width
from mlx_t5.text.prompts import HIDDEN

if TYPE_CHECKING:
    from mlx_t5.model import T5
    from mlx_t5.network.cache import Cache
    from mlx_t5.network.interface import Target

# Maximum number of source positions in an encoder pass of several prompts, with padding to the
# longest prompt; rounding up lengths on a GPU (`cache.source_width`) is not counted.
# Larger passes were not faster, and had more padding.
PASS_POSITIONS = 256
Item = TypeVar("Item")
Value = TypeVar("Value")


def by_length(
    lengths: Sequence[int] | Sequence[tuple[int, ...]],
    batch_size: int,
    most_tokens: float = math.inf,
) -> Iterator[list[int]]:
    """Groups items of similar length into batches of indices, the longest items first.

    Args:
        lengths: lengths of the items in tokens; if tuples, the first counts, the next ones order
            items of equal length.
        batch_size: maximum number of items in a batch.
        most_tokens: maximum number of tokens in a batch of several items, padding included.
    """
    keys = [length if isinstance(length, tuple) else (length,) for length in lengths]
    order = sorted(range(len(keys)), key=lambda i: keys[i], reverse=True)
    while order:
        size = max(1, int(min(batch_size, most_tokens // max(keys[order[0]][0], 1))))
        yield order[:size]
        order = order[size:]


def in_halves(
    work: Callable[[Sequence[Item]], Sequence[Value]],
    items: Sequence[Item],
    refuse: Callable[[Item, str], Value],
) -> Iterator[Value]:
    """Computes the values of all items together, or half by half if memory runs out.

    Args:
        work: computes the value of each item; like MLX, it raises RuntimeError or MemoryError if
            memory runs out. It is called only when a value is requested.
        items: the items, at least one.
        refuse: makes the value of an item that does not fit into memory even alone, from the item
            and the error's text.
    """
    try:
        yield from work(items)
        return
    except (RuntimeError, MemoryError) as error:
        reason = str(error)
    # Outside the handler, where the memory of the failed attempt has been freed.
    if len(items) == 1:
        yield refuse(items[0], reason)
        return
    half = (len(items) + 1) // 2
    yield from in_halves(work, items[:half], refuse)
    yield from in_halves(work, items[half:], refuse)


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
    if len(distinct) < len(keys):  # equal sources share what was computed, but not their rows
        row_of = {source: row for row, source in enumerate(distinct)}
        cache.filter([row_of[key] for key in keys])
    return cache if beams == 1 else cache.shared(beams, 1)


def cache_of(
    model: T5, sources: Sequence[Sequence[int]], states: Sequence[mx.array] | None = None
) -> Cache:
    """A decoder's cache with a row for each source; waits until it is computed."""
    cache = make_cache(model, sources, states or encoder_states(model, sources))
    mx.eval(cache.state)
    return cache
