"""Logits processors: they change the target's logits before a token is chosen.

These processors are applied in the order of transformers, then the user's own callables:

    repetition penalty     a logit l of a token already written becomes l / penalty if l > 0 and
                           l * penalty otherwise (CTRL, https://arxiv.org/abs/1909.05858)
    no repeated n-gram     a token that would complete an n-gram already written is forbidden
                           (https://arxiv.org/abs/1705.04304)
    bad words              a token that would complete one of these sequences is forbidden
    minimum length         the end tokens are forbidden until the text has enough tokens
    forced tokens          the first token, or the one that max_tokens allows last, is one of these
    suppressed tokens      these are forbidden

Temperature, top-k and top-p are applied later (draws.py). "Written" tokens are the decoder's tokens
with the start token, without the source. The proposals to verify are lazy arrays, so every
processor is a function of lazy arrays, and nothing here waits for the device.

Symbols: B rows, N columns of written tokens, T positions processed at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.settings import Settings

# processor(tokens (n,), logits (1, V)) -> logits (1, V): the interface of mlx-lm's processors.
# `tokens` are the row's tokens so far, the start token first. Both are lazy: reading their values
# waits for the device. A position may be processed several times, and its tokens may include
# proposals that are rejected later, so a processor must not keep a state between calls.
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

PADDING = -1  # fills the columns before the first token of a shorter row
ANY = -2  # fills the places before the first token of a shorter bad word


@dataclass(frozen=True)
class History:
    """The tokens that the B rows of a batch have written, right-aligned in N columns."""

    tokens: mx.array  # (B, N) int32, PADDING in front of shorter rows
    lengths: list[int]  # number of tokens of each row

    @classmethod
    def align(cls, rows: Sequence[Sequence[int]]) -> History:
        lengths = [len(row) for row in rows]
        width = max(lengths)
        aligned = [[PADDING] * (width - len(row)) + list(row) for row in rows]
        return cls(mx.array(aligned, mx.int32), lengths)

    def then(self, tokens: mx.array | None) -> History:
        """The history with k proposals (B, k) added to each row; None adds none."""
        if tokens is None:
            return self
        grown = mx.concatenate([self.tokens, tokens.astype(mx.int32)], axis=1)
        return History(grown, [length + tokens.shape[1] for length in self.lengths])


@dataclass(frozen=True)
class Processing:
    """The processors of a batch, for B rows with these settings."""

    settings: Sequence[Settings]
    eos: Sequence[int]

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
        _, positions, vocab_size = logits.shape
        penalty = [s.repetition_penalty for s in self.settings]
        if any(p != 1 for p in penalty):
            logits = penalize_repetition(history, logits, mx.array(penalty, mx.float32))
        for n, rows in self._used("no_repeat_ngram_size"):
            if n <= history.tokens.shape[1]:
                logits = mx.where(rows & repeats(history, logits, n), -mx.inf, logits)
        for words, rows in self._used("bad_words_ids"):
            # As in transformers, an end token alone is not forbidden.
            words = [word for word in words if len(word) > 1 or word[0] not in self.eos]
            if words:
                logits = mx.where(rows & completes(history, logits, words), -mx.inf, logits)
        # The number of tokens before each position (B, T, 1), without the start token.
        before = mx.array([n - positions for n in history.lengths])[:, None] + mx.arange(positions)
        before = before[..., None]
        if any(least := [s.min_tokens for s in self.settings]):
            early = before < mx.array(least)[:, None, None]
            logits = mx.where(early & _among(self.eos, vocab_size), -mx.inf, logits)
        last = mx.array([s.max_tokens - 1 for s in self.settings])[:, None, None]
        places = {"forced_bos_token_id": before == 0, "forced_eos_token_id": before == last}
        for name, here in places.items():
            for ids, rows in self._used(name):
                only = mx.where(_among(ids, vocab_size), 0.0, -mx.inf)
                logits = mx.where(rows & here, only, logits)
        for ids, rows in self._used("suppress_tokens"):
            logits = mx.where(rows & _among(ids, vocab_size), -mx.inf, logits)
        if any(s.logits_processors for s in self.settings):
            logits = self._call_custom(history, logits, counts)
        return logits

    def _used(self, name: str) -> Iterator[tuple[Any, mx.array]]:
        """Each value of a setting but "off", and which rows have it (B, 1, 1)."""
        values = [getattr(s, name) for s in self.settings]
        for value in filter(None, dict.fromkeys(values)):
            yield value, mx.array([v == value for v in values])[:, None, None]

    def _call_custom(self, history: History, logits: mx.array, counts: Sequence[int]) -> mx.array:
        positions, columns = logits.shape[1], history.tokens.shape[1]
        rows = []
        for b, processors in enumerate(s.logits_processors for s in self.settings):
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
    columns = history.tokens.shape[1]
    ends = mx.arange(columns - logits.shape[1] + 1, columns + 1)  # columns before each position
    seen = mx.arange(columns) < ends[:, None]
    written = _marked(history.tokens[:, None], seen, logits.shape)
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


def completes(history: History, logits: mx.array, words: Sequence[Sequence[int]]) -> mx.array:
    """Marks (B, T, V) the tokens that would complete one of K words (sequences of tokens)."""
    batch, positions, _ = logits.shape
    longest = max(map(len, words))
    tokens = mx.pad(history.tokens, ((0, 0), (longest, 0)), constant_values=PADDING)
    aligned = mx.array([[ANY] * (longest - len(word)) + list(word) for word in words])
    matches = mx.ones((batch, positions, len(words)), mx.bool_)
    for i in range(1, longest):  # compares the tokens i places before each position and word's end
        first = tokens.shape[1] - positions + 1 - i
        before, part = tokens[:, first : first + positions, None], aligned[:, -1 - i]
        matches = matches & ((before == part) | (part == ANY))
    return _marked(aligned[None, None, :, -1], matches, logits.shape)


def _among(ids: Sequence[int], vocab_size: int) -> mx.array:
    return (mx.arange(vocab_size)[:, None] == mx.array(ids)).any(axis=-1)


def _marked(tokens: mx.array, marked: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Whether each token of the vocabulary is marked (B, T, V), from `tokens` (B, 1, K)."""
    batch, positions, vocab_size = shape
    marked = marked & (tokens != PADDING) & (tokens < vocab_size)
    columns_of = mx.where(marked, tokens, vocab_size)
    marks = mx.zeros((batch, positions, vocab_size + 1), mx.bool_)
    return mx.put_along_axis(marks, columns_of, mx.array(True), axis=-1)[..., :vocab_size]
