"""Log-probabilities of written tokens, for the rows that ask for them.

They are those of the target's own distribution: log softmax of its logits, before temperature,
top-p and `delta`, whoever proposed the token. They are taken from the pass that verifies, so they
cost no other, and rows that do not ask cost nothing.

Symbols: B rows, T positions, V vocabulary, K alternatives, R rows that ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_t5.backend import mx

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Row


@dataclass(frozen=True)
class TokenLogprob:
    """One written token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens there and theirs, likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobRecorder:
    """Listens to an engine's steps: `engine.on_verified = recorder`, and `collect` after a step."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[Row, int]] = {}  # by id(row); holding the row keeps the id
        self._rows: list[Row] = []
        self._arrays: tuple[mx.array, ...] = ()
        self._before: list[int] = []

    def watch(self, row: Row, alternatives: int) -> None:
        """Records this row from now on, with so many alternatives a token (0: none)."""
        self._wanted[id(row)] = (row, alternatives)

    def forget(self, row: Row) -> None:
        """Records this row no longer."""
        self._wanted.pop(id(row), None)

    def __call__(self, rows: Sequence[Row], logits: mx.array, tokens: mx.array) -> None:
        """Takes what a step needs out of logits (B, T, V) and tokens (B, T), lazily."""
        places = [i for i, row in enumerate(rows) if id(row) in self._wanted]
        self._rows = [rows[i] for i in places]
        self._before = [row.decided for row in self._rows]
        if not places:
            return
        count = max(self._wanted[id(row)][1] for row in self._rows)
        self._arrays = logprobs(logits[mx.array(places)], tokens[mx.array(places)], count)
        mx.async_eval(*self._arrays)

    def collect(self) -> list[tuple[Row, list[TokenLogprob]]]:
        """What the last step wrote, for each row that asked; EOS included."""
        rows, self._rows = self._rows, []
        if not rows:
            return []
        own, top, ids = (array.tolist() for array in self._arrays)
        self._arrays = ()
        found = []
        for r, (row, before) in enumerate(zip(rows, self._before, strict=True)):
            tokens, alternatives = row.committed[1 + before :], self._wanted[id(row)][1]
            each = [
                TokenLogprob(
                    token,
                    own[r][t],
                    list(zip(ids[r][t], top[r][t], strict=True))[:alternatives],
                )
                for t, token in enumerate(tokens)
            ]
            found.append((row, each))
        return found


def logprobs(logits: mx.array, tokens: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probabilities of tokens, and of the likeliest ones.

    Args:
        logits: (R, T, V) float32.
        tokens: (R, T) int32.
        count: K, at most V.

    Returns:
        (R, T) float32 of the tokens, (R, T, K) float32 of the likeliest, in falling order, and
        their ids (R, T, K).
    """
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logits, tokens[..., None], axis=-1) - total
    ids = mx.argsort(-logits, axis=-1)[..., :count]
    top = mx.take_along_axis(logits, ids, axis=-1) - total
    return own[..., 0], top, ids
