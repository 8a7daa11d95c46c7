"""Logits processors: they change the target's logits before a token is chosen.

These three processors are applied in the order of transformers, then the user's own callables:

    repetition penalty     a logit l of a token already written becomes l / penalty if l > 0 and
                           l * penalty otherwise (CTRL, https://arxiv.org/abs/1909.05858)
    no repeated n-gram     a token that would complete an n-gram already written is forbidden
                           (https://arxiv.org/abs/1705.04304)
    minimum length         the end tokens are forbidden until the text has enough tokens

Temperature, top-k and top-p are applied later (draws.py). "Written" tokens are the decoder's tokens
with the start token; the tokens of the source do not count. The proposals to verify are lazy
arrays. So every processor is a function of lazy arrays, and nothing here waits for the device. With
delta = 0, speculative decoding samples from the distribution of the processed logits, like regular
decoding.

Symbols: B rows, N columns of written tokens, T positions processed at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_t5.backend import mx
from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from mlx_t5.settings import Settings

# processor(tokens (n,), logits (1, V)) -> logits (1, V): the interface of mlx-lm's processors.
# `tokens` are the row's tokens so far, the start token first. Both are lazy: reading their values
# waits for the device. A position may be processed several times, and its tokens may include
# proposals that are rejected later, so a processor must not keep a state between calls.
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

PADDING = -1  # fills the columns before the first token of a shorter row


@dataclass(frozen=True)
class History:
    """The tokens that the B rows of a batch have written, right-aligned in N columns.

    Attributes:
        tokens: (B, N) int32, PADDING in front of shorter rows.
        lengths: number of tokens of each row.
    """

    tokens: mx.array
    lengths: list[int]

    @classmethod
    def align(cls, committed: Sequence[Sequence[int]]) -> History:
        """Returns the history of rows whose tokens are Python lists."""
        lengths = [len(row) for row in committed]
        width = max(lengths)
        aligned = [[PADDING] * (width - len(row)) + list(row) for row in committed]
        return cls(mx.array(aligned, mx.int32), lengths)

    def then(self, tokens: mx.array | None) -> History:
        """Returns the history with proposals (B, k) added, k to each of B rows; None adds none."""
        if tokens is None:
            return self
        grown = mx.concatenate([self.tokens, tokens.astype(mx.int32)], axis=1)
        return History(grown, [length + tokens.shape[1] for length in self.lengths])

    def seen(self, positions: int) -> mx.array:
        """Returns bool (positions, columns): whether a column of `tokens` is before a position.

        All columns are before the last position, all but one before the second to last, and so on.
        """
        columns = self.tokens.shape[1]
        ends = mx.arange(columns - positions + 1, columns + 1)
        return mx.arange(columns) < ends[:, None]


@dataclass(frozen=True)
class Processing:
    """The processors of a batch; each list has an entry per row.

    Attributes:
        penalty: repetition penalty, 1 = off.
        ngram_size: size of n-grams that may be written only once, 0 = off.
        min_tokens: minimum number of tokens before the end token, 0 = off.
        custom: the user's own processors for the row, applied in order.
        eos: the end tokens.
    """

    penalty: list[float]
    ngram_size: list[int]
    min_tokens: list[int]
    custom: list[tuple[LogitsProcessor, ...]]
    eos: tuple[int, ...]

    @classmethod
    def of(cls, settings: Sequence[Settings], eos: Sequence[int]) -> Processing | None:
        """Returns the processors of B rows; None if no row uses any."""
        penalty = [s.repetition_penalty for s in settings]
        ngram_size = [s.no_repeat_ngram_size for s in settings]
        min_tokens = [s.min_tokens for s in settings]
        custom = [tuple(s.logits_processors) for s in settings]
        if set(penalty) <= {1} and not (any(ngram_size) or any(min_tokens) or any(custom)):
            return None
        return cls(penalty, ngram_size, min_tokens, custom, tuple(eos))

    def __call__(self, history: History, logits: mx.array, counts: Sequence[int]) -> mx.array:
        """Returns the processed logits of T positions per row, lazily; skips unused processors.

        Args:
            history: all tokens before the last position, proposals included.
            logits: (B, T, V) float32 of B rows. The tokens before position t are those of `history`
                without the last T - 1 - t.
            counts: number of positions of each row that are not padding; the user's own processors
                are called only for these positions.

        Returns:
            (B, T, V).

        Raises:
            UserError: a user's processor returned no array, or an array of a wrong shape.
        """
        if any(penalty != 1 for penalty in self.penalty):
            logits = penalize_repetition(history, logits, mx.array(self.penalty, mx.float32))
        columns = history.tokens.shape[1]
        for n in sorted(n for n in set(self.ngram_size) if 0 < n <= columns):
            chosen = mx.array([size == n for size in self.ngram_size])[:, None, None]
            logits = mx.where(chosen & repeats(history, logits, n), -mx.inf, logits)
        if any(self.min_tokens):
            early = too_early(history, logits.shape[1], self.min_tokens)
            ends = (mx.arange(logits.shape[2])[:, None] == mx.array(self.eos)).any(axis=-1)
            logits = mx.where(early[..., None] & ends, -mx.inf, logits)
        if any(self.custom):
            logits = self._call_custom(history, logits, counts)
        return logits

    def _call_custom(self, history: History, logits: mx.array, counts: Sequence[int]) -> mx.array:
        """Applies the user's own processors, row by row and position by position."""
        positions, columns = logits.shape[1], history.tokens.shape[1]
        rows = []
        for b, processors in enumerate(self.custom):
            first = columns - history.lengths[b]
            processed = [logits[b, t : t + 1] for t in range(positions)]
            for t in range(counts[b]):
                tokens = history.tokens[b, first : columns - positions + 1 + t]
                for processor in processors:
                    processed[t] = _checked(processor(tokens, processed[t]), processed[t].shape)
            rows.append(mx.concatenate(processed, axis=0))
        return mx.stack(rows)


def _checked(processed: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Checks that a user's processor returned logits; returns them as float32."""
    if not isinstance(processed, mx.array) or processed.shape != shape:
        got = f"shape {processed.shape}" if isinstance(processed, mx.array) else type(processed)
        raise UserError(f"a logits processor returned {got}; return an mx.array of shape {shape}")
    return processed.astype(mx.float32)


def penalize_repetition(history: History, logits: mx.array, penalty: mx.array) -> mx.array:
    """Makes tokens already written less likely (penalty > 1) or more likely (penalty < 1).

    Args:
        history: all tokens before the last position; see `Processing.__call__`.
        logits: (B, T, V), for T positions of each of B rows.
        penalty: (B,), a number above 0 for each row; 1 changes nothing.
    """
    penalty = penalty[:, None, None]
    penalized = mx.where(logits < 0, logits * penalty, logits / penalty)
    written = history.seen(logits.shape[1])
    written = _marked(history.tokens[:, None], written, logits.shape)
    return mx.where(written, penalized, logits)


def repeats(history: History, logits: mx.array, n: int) -> mx.array:
    """Marks the tokens that would complete an n-gram that the row has written already.

    The n - 1 tokens before a position begin an n-gram, and the next token completes it. If an
    earlier n-gram begins with the same n - 1 tokens, its last token is marked. An n-gram that
    starts at column s is earlier if s + n <= P, where P is the number of columns before the
    position. The loop compares one token of the n-grams at a time, for all starts and positions.

    Args:
        history: all tokens before the last position; see `Processing.__call__`.
        logits: (B, T, V), for T positions of each of B rows; only the shape is used.
        n: length of the n-grams, from 1 to the number of columns.

    Returns:
        (B, T, V) bool.
    """
    positions = logits.shape[1]
    # Pads on the left, so that every position has n - 1 columns before it.
    missing = max(n + positions - 2 - history.tokens.shape[1], 0)
    tokens = mx.pad(history.tokens, ((0, 0), (missing, 0)), constant_values=PADDING)
    columns = tokens.shape[1]
    starts = columns - n + 1
    last = tokens[:, n - 1 :]  # (B, starts) the token that completes each n-gram
    ends = mx.arange(columns - positions + 1, columns + 1)  # P of each position
    # If a row has fewer than n - 1 tokens, padding is compared too; it equals only padding.
    counts = mx.arange(starts) + n <= ends[:, None]  # (T, starts)
    for i in range(n - 1):
        suffix = columns - positions + 1 - (n - 1) + i
        suffix_tokens = tokens[:, suffix : suffix + positions, None]
        counts = counts & (tokens[:, None, i : i + starts] == suffix_tokens)
    return _marked(last[:, None], counts, logits.shape)


def too_early(history: History, positions: int, min_tokens: Sequence[int]) -> mx.array:
    """Returns bool (rows, positions): whether fewer than `min_tokens` tokens precede a position."""
    before = mx.array([length - positions for length in history.lengths])  # without the start token
    return before[:, None] + mx.arange(positions) < mx.array(min_tokens)[:, None]


def _marked(tokens: mx.array, marked: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Returns bool (B, T, V): whether each token of the vocabulary is marked at each position.

    Args:
        tokens: (B, 1, K), K tokens of each row. PADDING and ids outside the vocabulary are ignored.
        marked: bool (B or 1, T, K), which of the K tokens are marked at each position.
        shape: (B, T, V).
    """
    batch, positions, vocab_size = shape
    marked = marked & (tokens != PADDING) & (tokens < vocab_size)
    columns_of = mx.where(marked, tokens, vocab_size)
    marks = mx.zeros((batch, positions, vocab_size + 1), mx.bool_)
    return mx.put_along_axis(marks, columns_of, mx.array(True), axis=-1)[..., :vocab_size]
