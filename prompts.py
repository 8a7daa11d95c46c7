"""Prompts and seeds as callers give them, checked and turned into what the engine takes.

Symbols: B rows, S source positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from numbers import Integral
from typing import TYPE_CHECKING, Any

from backend import UserError, mx
from sampling import row_key
from tokenizer_files import encode

if TYPE_CHECKING:
    from cache import Cache
    from model import T5

PREFIX_TOKENS = 16  # a task prefix ("fix grammar:") ends among the first so many tokens


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt, a text or token ids, and not a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def token_ids(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int) -> list[int]:
    """The source tokens of one prompt.

    Raises:
        UserError: the prompt is empty or has an id outside the vocabulary, or it is a text and
            there is no tokenizer, or the tokenizer cannot read it.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("a prompt is empty; write the text to work on")
        if tokenizer is None:
            raise UserError("text prompts need a tokenizer; this model folder has none")
        prompt = encode(tokenizer, prompt)
    ids = [int(token) for token in prompt]
    if not ids:
        raise UserError("a prompt is empty; give at least one token id")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise UserError(f"token id {bad} is outside the model's vocabulary of {vocab_size}")
    return ids


def prefix_ends(tokenizer: Any) -> frozenset[int]:
    """The tokens that can end a task prefix; none if there is no tokenizer."""
    vocabulary = tokenizer.get_vocab() if tokenizer else {}
    return frozenset(i for token, i in vocabulary.items() if token.endswith(":"))


def task_prefix(ids: Sequence[int], ends: Collection[int]) -> tuple[int, ...]:
    """The tokens that tell T5 what to do ("fix grammar:"), () if the prompt has none.

    Args:
        ids: source tokens.
        ends: what `prefix_ends` says.
    """
    last = next((i for i, token in enumerate(ids[:PREFIX_TOKENS]) if token in ends), -1)
    return tuple(ids[: last + 1])


def random_keys(seed: int | Sequence[int], samples: int = 1) -> Iterator[list[mx.array]]:
    """The random keys (2,) of the samples of one prompt after the other.

    Args:
        seed: one, from which sample j of prompt i gets stream i * samples + j, or one a prompt,
            from which its sample j gets stream j.
        samples: of each prompt.

    Raises:
        UserError: a seed is out of range.
    """
    own = isinstance(seed, Sequence)
    for value in seed if own else [seed]:
        if not 0 <= value < 2**64:
            raise UserError(f"seed is {value}; it must be between 0 and 2**64 - 1")
    starts = ((value, 0) for value in seed) if own else ((seed, i * samples) for i in count())
    return ([row_key(value, first + j) for j in range(samples)] for value, first in starts)


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[mx.array, mx.array | None]:
    """Right-pads token lists to (B, S); mask (B, S) is None if nothing was padded."""
    width = max(map(len, rows))
    ids = mx.array([list(row) + [pad] * (width - len(row)) for row in rows], mx.int32)
    if all(len(row) == width for row in rows):
        return ids, None
    return ids, mx.arange(width) < mx.array([[len(row)] for row in rows])


def encoded(model: T5, sources: Sequence[Sequence[int]]) -> Cache:
    """A decoder's cache with a row for each source; equal ones are encoded once.

    Raises:
        RuntimeError: the device has not enough memory.
    """
    sources = [tuple(source) for source in sources]
    different = list(dict.fromkeys(sources))
    ids, mask = padded(different, model.config.pad_token_id)
    cache = model.cache(model.encode(ids, mask), mask)
    if len(different) < len(sources):
        cache.keep([different.index(source) for source in sources])
    mx.eval(cache.state)
    return cache
