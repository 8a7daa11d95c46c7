"""Prompts and seeds as callers give them, checked and turned into what the engine takes.

Symbols: B rows, S source positions.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from numbers import Integral
from typing import TYPE_CHECKING, Any

from backend import UserError, mx
from sampling import row_key

if TYPE_CHECKING:
    from cache import Cache
    from model import T5

# A task prefix has at most so many characters, and so no more tokens.
# "Remove all grammatical errors from this text:" has 45.
PREFIX_LENGTH = 64
_PREFIX = re.compile(r"\s*(?P<words>[^\s.:!?][^\n.:!?]{0,62}):\s")
# Prefixes that begin with a capital begin with one of these, as instructions like CoEdIT's do.
REWRITING = frozenset(
    "Change Clarify Correct Edit Fix Formalize Improve Make Neutralize Paraphrase Polish Proofread "
    "Remove Rephrase Reword Rewrite Shorten Simplify Summarize Translate Write".split()
)


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt, a text or token ids, and not a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def token_ids(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int) -> list[int]:
    """The source tokens of one prompt.

    Raises:
        UserError: the prompt is empty or has an id outside the vocabulary, or it is a text and
            there is no tokenizer.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("a prompt is empty; write the text to work on")
        if tokenizer is None:
            raise UserError("text prompts need a tokenizer; this model folder has none")
        prompt = tokenizer.encode(prompt)
    ids = [int(token) for token in prompt]
    if not ids:
        raise UserError("a prompt is empty; give at least one token id")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise UserError(f"token id {bad} is outside the model's vocabulary of {vocab_size}")
    return ids


def task_prefix(ids: Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """The tokens that tell T5 what to do ("fix grammar:"), () if the prompt has none.

    What is one cannot be known from the text alone, and only speed depends on it. Taken for one is
    the beginning up to a colon and a space, within `PREFIX_LENGTH` characters and one sentence. It
    begins in lower case ("translate English to German:", "stsb sentence1:"), as sentences do not,
    or with a word that asks for a rewriting ("Fix grammatical errors in this sentence:"), and does
    not end in a number. So "She said:" and "Call me at 10:" are none; nor are "Question:" and
    others with a capital, and "she said:" is one.

    Args:
        ids: source tokens.
        tokenizer: None knows of no prefixes.
    """
    if tokenizer is None:
        return ()
    pieces = [tokenizer.convert_ids_to_tokens(token) or "" for token in ids[: PREFIX_LENGTH + 1]]
    found = _PREFIX.match("".join(pieces).replace("▁", " "))
    if not found:
        return ()
    words = found["words"].split()
    if words[-1].isdigit() or (words[0][0].isupper() and words[0] not in REWRITING):
        return ()
    ends = list(accumulate(map(len, pieces)))
    return tuple(ids[: bisect_left(ends, found.end("words") + 1) + 1])


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
