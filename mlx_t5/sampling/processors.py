"""Logits processors: they change the target's logits before a token is chosen.

These three processors are applied in the order of transformers, then the user's own callables:

    repetition penalty     a logit l of a token already written becomes l / penalty if l > 0 and
                           l * penalty otherwise (CTRL, https://arxiv.org/abs/1909.05858)
    no repeated n-gram     a token that would complete an n-gram already written is forbidden
                           (https://arxiv.org/abs/1705.04304)
    minimum length         the end tokens are forbidden until the text has enough tokens

Temperature, top-k and top-p are applied later (draws.py). "Written" tokens are the decoder's tokens
with the start token, without the source. The proposals to verify are lazy arrays, so every
processor is a function of lazy arrays, and nothing here waits for the device.

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
    """The tokens that the B rows of a batch have written, right-aligned in N columns."""

    tokens: mx.array  # (B, N) int32, PADDING in front of shorter rows
    lengths: list[int]  # number of tokens of each row

    @classmethod
    def align(cls, committed: Sequence[Sequence[int]]) -> History:
        lengths = [len(row) for row in committed]
        width = max(lengths)
        aligned = [[PADDING] * (width - len(row)) + list(row) for row in committed]
        return cls(mx.array(aligned, mx.int32), lengths)

    def then(self, tokens: mx.array | None) -> History:
        """The history with k proposals (B, k) added to each row; None adds none."""
        if tokens is None:
            return self
        grown = mx.concatenate([self.tokens, tokens.astype(mx.int32)], axis=1)
        return History(grown, [length + tokens.shape[1] for length in self.lengths])

    def seen(self, positions: int) -> mx.array:
        columns = self.tokens.shape[1]
        ends = mx.arange(columns - positions + 1, columns + 1)
        return mx.arange(columns) < ends[:, None]


@dataclass(frozen=True)
class Processing:
    """The processors of a batch; each list has an entry per row."""

    penalty: list[float]  # 1 = off
    ngram_size: list[int]  # 0 = off
    min_tokens: list[int]  # 0 = off
    custom: list[tuple[LogitsProcessor, ...]]
    eos: tuple[int, ...]

    @classmethod
    def of(cls, settings: Sequence[Settings], eos: Sequence[int]) -> Processing | None:
        """The processors of B rows; None if no row uses any."""
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
            logits: (B, T, V) float32; position t has the history without the last T - 1 - t tokens.
            counts: number of positions of each row that are not padding; the user's own processors
                are called only for these positions.

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
            positions = logits.shape[1]
            before = mx.array([n - positions for n in history.lengths])  # without the start token
            least = mx.array(self.min_tokens)[:, None]
            early = before[:, None] + mx.arange(positions) < least
            ends = (mx.arange(logits.shape[2])[:, None] == mx.array(self.eos)).any(axis=-1)
            logits = mx.where(early[..., None] & ends, -mx.inf, logits)
        if any(self.custom):
            logits = self._call_custom(history, logits, counts)
        return logits

    def _call_custom(self, history: History, logits: mx.array, counts: Sequence[int]) -> mx.array:
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
    if not isinstance(processed, mx.array) or processed.shape != shape:
        got = f"shape {processed.shape}" if isinstance(processed, mx.array) else type(processed)
        raise UserError(f"a logits processor returned {got}; return an mx.array of shape {shape}")
    return processed.astype(mx.float32)


def penalize_repetition(history: History, logits: mx.array, penalty: mx.array) -> mx.array:
    """Makes tokens already written less likely (penalty (B,) > 1) or more likely (< 1)."""
    penalty = penalty[:, None, None]
    penalized = mx.where(logits < 0, logits * penalty, logits / penalty)
    written = history.seen(logits.shape[1])
    written = _marked(history.tokens[:, None], written, logits.shape)
    return mx.where(written, penalized, logits)


def repeats(history: History, logits: mx.array, n: int) -> mx.array:
    """Marks (B, T, V) the tokens that would complete an n-gram that the row has already."""
    # If an earlier n-gram begins with the n - 1 tokens before a position, its last token is marked.
    # An n-gram that starts at column s is earlier if s + n <= P, the number of columns before the
    # position. The loop compares one token at a time, for all starts and positions.
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


def _marked(tokens: mx.array, marked: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Whether each token of the vocabulary is marked (B, T, V), from `tokens` (B, 1, K)."""
    batch, positions, vocab_size = shape
    marked = marked & (tokens != PADDING) & (tokens < vocab_size)
    columns_of = mx.where(marked, tokens, vocab_size)
    marks = mx.zeros((batch, positions, vocab_size + 1), mx.bool_)
    return mx.put_along_axis(marks, columns_of, mx.array(True), axis=-1)[..., :vocab_size]
