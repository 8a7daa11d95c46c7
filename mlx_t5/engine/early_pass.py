"""The next pass of regular decoding, handed to the device before the host reads the last token.

A GPU computes it while the host learns what it is about. The last one of a text is wasted, and
waited for. In a batch, whose rows come and go, that would happen often, so only a row that is alone
has one; with a draft, only where the next step is sure not to ask it. A pass in flight keeps the
caches it reads, which are therefore copied to be written: that costs more than it saves once they
are large. Ranks that share a model begin none: one that is interrupted would leave a sum over all
of them in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import cpu_only, mx
from mlx_t5.engine.rows import Row
from mlx_t5.network.ranks import ranks_of

if TYPE_CHECKING:
    from mlx_t5.network.exact import ExactTarget
    from model import T5

MOST_COPIED = 64 << 20  # bytes of the caches that are written


class EarlyPass:
    """The pass that is on its way, if there is one."""

    @classmethod
    def of(cls, target: T5 | ExactTarget) -> EarlyPass | None:
        """For passes of this model; None on a CPU, and where ranks share it."""
        return None if cpu_only() or ranks_of(target).size > 1 else cls(target)

    def __init__(self, target: T5 | ExactTarget) -> None:
        """Begins passes of this model."""
        self._target = target
        self._of: tuple[Row, int] | None = None  # a row, and the position that is fed
        self._logits: mx.array | None = None

    def begin(self, rows: Sequence[Row], tokens: mx.array, cache: Any, awaited: mx.array) -> None:
        """Feeds the token that a step without proposals has chosen, if that pays.

        Args:
            rows: of the batch.
            tokens: (B, 1) chosen by the step, still computed.
            cache: of the rows.
            awaited: what the host is going to wait for; it goes first.
        """
        if len(rows) > 1:
            return
        (row,) = rows
        position = len(row.committed)
        if position == row.settings.max_tokens:
            return  # the last token
        if self._target.cache_memory(1, 0, position + 1) > MOST_COPIED:
            return
        mx.async_eval(awaited)
        cache.reserve(position + 1)
        self._of, self._logits = (row, position), self._target.decode(tokens, cache, [position])
        mx.async_eval(self._logits)

    def take(self, rows: Sequence[Row]) -> mx.array | None:
        """Logits (1, 1, V) after the last token of the only row; None if nothing has begun."""
        (of, logits), self._of, self._logits = (self._of, self._logits), None, None
        alone = of is not None and len(rows) == 1 and rows[0] is of[0]
        return logits if alone and of and of[1] == len(of[0].committed) - 1 else None
