"""Finds where a text runs into a loop, as vLLM's `repetition_detection` does.

tokens   x y  a b c  a b c  a b c     min_count = 3 copies of a pattern of 3 tokens
                     └ these go ┘     one copy stays
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlx_t5.settings import Repetition

MOST_SIZE = 16  # words or characters of a pattern that `most_copies` looks for


def repeated(tokens: Sequence[int], size: int, most: int) -> int:
    """How many of the last tokens, at most `most`, equal the token `size` places before."""
    count, most = 0, min(most, len(tokens) - size)
    while count < most and tokens[-1 - count] == tokens[-1 - count - size]:
        count += 1
    return count


def until_repetition(
    tokens: Sequence[int], new: Sequence[int], detection: Repetition, min_tokens: int = 0
) -> tuple[int, int]:
    """How many `new` tokens a text takes before it ends in a loop, and how many copies then go.

    All tokens that are copies go, but those of the first copy. Of several patterns that are
    complete, the shortest counts. At least `min_tokens` tokens of the text stay.
    """
    text = list(tokens)
    for count, token in enumerate(new, 1):
        text.append(token)
        for size in detection.sizes(len(text)):
            copies = size * (detection.min_count - 1)
            if copies <= len(text) - min_tokens and repeated(text, size, copies) == copies:
                return count, copies
    return len(new), 0


def uncertain(tokens: Sequence[int], detection: Repetition) -> int:
    """The number of last tokens that will go if the text goes on as a loop."""
    sizes, more = detection.sizes(len(tokens)), detection.min_count - 1
    return max((repeated(tokens, size, size * more) for size in sizes), default=0)


def most_copies(text: str) -> int:
    """How often a text repeats something without a break: 5 for "Ha ha, ha ha HA!"."""
    text = text.casefold()
    return max(_most_copies(re.findall(r"\w+", text)), _most_copies("".join(text.split())))


def _most_copies(items: Sequence[str]) -> int:
    longest = 0
    for size in range(1, MOST_SIZE + 1):
        run = 0
        for item, later in zip(items, items[size:], strict=False):
            run = run + 1 if item == later else 0
            longest = max(longest, run // size)
    return longest + 1
