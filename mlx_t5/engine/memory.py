"""Whether memory suffices for the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_t5.backend.device_memory import keep_buffers, require, wire
from mlx_t5.network.cache import source_width
from mlx_t5.network.encoding import PASS_POSITIONS, by_length


def require_for(
    models: Sequence[Any],
    new: Sequence[Any],
    running: Sequence[Any],
    ahead: Sequence[Any] = (),
    beams: int = 1,
) -> None:
    """Raises RuntimeError unless there is memory to encode new rows and to decode them all.

    Memory for a cache of all rows must be free beside the running one, as joining rows copies it;
    it is also wired on a Mac. `ahead` are rows that are encoded now, but join later.
    """
    rows = [*running, *new]
    source = source_width(max(len(row.ids) for row in rows))
    target = max(row.settings.max_tokens for row in rows)
    sources = {tuple(row.ids) for row in (*new, *ahead)}  # equal sources are encoded once
    lengths = [len(ids) for ids in sources]
    groups = list(by_length(lengths, len(lengths), PASS_POSITIONS))  # as in `encoder_states`
    needed = sum(
        model.cache_memory(len(rows), source, target, beams * len(rows))
        + max(model.encoder_memory(len(g), source_width(lengths[g[0]])) for g in groups)
        for model in models
    )
    require(needed)
    keep_buffers(needed)
    wire(needed)


def longest_text(models: Sequence[Any], tokens: int, rows: int, beams: int, space: int) -> int:
    """Lowers `tokens`, the maximum of a text, if not even one such text fits into `space` bytes.

    After that, the caches of `rows` texts take at most half of the space.
    """
    texts, most = 1, space
    while tokens > 1:
        caches = sum(model.cache_memory(texts, 0, tokens, beams * texts) for model in models)
        if caches <= most:
            break
        texts, most = rows, space // 2
        tokens //= 2
    return tokens
