"""Starts the next pass of regular decoding before Python has read the previous pass's token.

The GPU computes this early pass while Python reads the token; the last one per text is wasted. So
none starts if the batch has several rows, as rows often join or leave, or if the next step may
propose tokens. Nor if the cache is large: as the pass before still reads it, MLX has to copy it
before a new token is written to it, which takes longer than the early pass saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import cpu_only, mx
from mlx_t5.engine.rows import Row

if TYPE_CHECKING:
    from mlx_t5.network.interface import Target

MOST_COPIED = 64 << 20  # bytes; copying a larger cache costs more time than is saved


class EarlyPass:
    """The decoder pass, if any, that was started before Python read the previous one's token."""

    @classmethod
    def of(cls, target: Target) -> EarlyPass | None:
        return None if cpu_only() else cls(target)

    def __init__(self, target: Target) -> None:
        self._target = target
        self._place: tuple[Row, int] | None = None  # the row, and the position that is fed
        self._logits: mx.array | None = None

    def begin(self, rows: Sequence[Row], tokens: mx.array, cache: Any, awaited: mx.array) -> None:
        """Starts a pass over `tokens` (1, 1), after `awaited`, the array that Python waits for."""
        if len(rows) > 1:
            return
        (row,) = rows
        position = len(row.committed)
        if position == row.settings.max_tokens:
            return  # the last token
        if self._target.cache_memory(1, 0, position + 1) > MOST_COPIED:
            return
        mx.async_eval(awaited)
        self._place, self._logits = (row, position), self._target.decode(tokens, cache, [position])
        mx.async_eval(self._logits)

    def take(self, rows: Sequence[Row]) -> mx.array | None:
        """The early pass's logits (1, 1, vocabulary); None if these rows have none."""
        (place, logits), self._place, self._logits = (self._place, self._logits), None, None
        alone = place is not None and len(rows) == 1 and rows[0] is place[0]
        return logits if alone and place and place[1] == len(place[0].committed) - 1 else None
