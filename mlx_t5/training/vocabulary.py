"""Which tokens a draft is to propose: those that the target writes most (draft_vocabulary.py).

They are counted in the answers that the draft is trained on. How many are enough is judged by other
answers, those to the held-out prompts.

Symbols: N tokens of the draft, V of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlx_t5.training.teacher_answers import joined

STEP = 1024  # N is a multiple
ENOUGH = 0.995  # of the held-out answers' tokens


def by_frequency(answers: Sequence[Any], ends: Sequence[int], size: int) -> np.ndarray:
    """All ids below `size`: the end tokens `ends`, then the most frequent in the answers.

    Equally frequent ones are in the order of their ids: tokenizers mostly have common tokens first.
    """
    tokens = joined(answers, np.int64)
    counts = np.bincount(tokens[(tokens >= 0) & (tokens < size)], minlength=size)
    counts[[end for end in ends if end < size]] = len(tokens) + 1
    return np.argsort(-counts, kind="stable")


def chosen(
    order: np.ndarray, held_out: Sequence[Any], size: int | None, log: Callable[[str], object]
) -> np.ndarray:
    """The ids (N,) of the tokens that a draft is to propose, ascending.

    Args:
        order: all ids, as `by_frequency` returns them.
        held_out: answers that show how many are enough.
        size: N; None is the `smallest` that is enough.
        log: gets a line about it.
    """
    ids = np.sort(order[: size or smallest(order, held_out)])
    share = f"{coverage(ids, held_out):.1%} of what the target writes to held-out prompts"
    log(f"the draft proposes {len(ids):,} of {len(order):,} tokens: {share}")
    return ids


def coverage(ids: np.ndarray, answers: Sequence[Any]) -> float:
    """The share of the answers' tokens that are among `ids`; 1 if there are none."""
    tokens = joined(answers, np.int64)
    return float(np.isin(tokens, ids).mean()) if len(tokens) else 1.0


def smallest(order: np.ndarray, answers: Sequence[Any]) -> int:
    """N: the smallest multiple of `STEP` whose most frequent tokens are enough, or all.

    Args:
        order: all ids, the most frequent first.
        answers: to held-out prompts.
    """
    sizes = range(STEP, len(order), STEP)
    return next((n for n in sizes if coverage(order[:n], answers) >= ENOUGH), len(order))
