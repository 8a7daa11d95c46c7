"""Chooses the tokens that a draft proposes: those that the target writes most.

They are counted in the answers that the draft is trained on. The answers to held-out prompts decide
how many are enough. See network/draft_vocabulary.py.

Symbols: N tokens of the draft, V of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlx_t5.training.teacher_answers import joined

STEP = 1024  # N is a multiple of it
ENOUGH = 0.995  # share of the held-out answers' tokens


def by_frequency(answers: Sequence[Any], ends: Sequence[int], size: int) -> np.ndarray:
    """Returns all ids below `size`: the end tokens `ends`, then the others by frequency.

    Equally frequent ids are in ascending order, as tokenizers mostly have common tokens first.
    """
    tokens = joined(answers, np.int64)
    counts = np.bincount(tokens[(tokens >= 0) & (tokens < size)], minlength=size)
    counts[[end for end in ends if end < size]] = len(tokens) + 1
    return np.argsort(-counts, kind="stable")


def chosen(
    order: np.ndarray, held_out: Sequence[Any], size: int | None, log: Callable[[str], object]
) -> np.ndarray:
    """Returns the ids (N,) of the tokens that a draft proposes, ascending.

    Args:
        order: all ids, from `by_frequency`.
        held_out: answers that show how many are enough.
        size: N; None takes the `smallest` that is enough.
        log: gets a line about the choice.
    """
    ids = np.sort(order[: size or smallest(order, held_out)])
    share = f"{coverage(ids, held_out):.1%} of what the target writes to held-out prompts"
    log(f"the draft proposes {len(ids):,} of {len(order):,} tokens: {share}")
    return ids


def coverage(ids: np.ndarray, answers: Sequence[Any]) -> float:
    """Returns the share of the answers' tokens that are among `ids`; 1 without answers."""
    tokens = joined(answers, np.int64)
    return float(np.isin(tokens, ids).mean()) if len(tokens) else 1.0


def smallest(order: np.ndarray, answers: Sequence[Any]) -> int:
    """Returns N: the smallest multiple of `STEP` whose most frequent tokens are enough, or all.

    Args:
        order: all ids, the most frequent first.
        answers: answers to held-out prompts.
    """
    sizes = range(STEP, len(order), STEP)
    return next((n for n in sizes if coverage(order[:n], answers) >= ENOUGH), len(order))
