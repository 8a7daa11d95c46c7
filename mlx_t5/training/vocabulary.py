"""Chooses the tokens that a draft may propose: the most frequent ones in the target's answers.

Tokens are counted in the answers on which the draft is trained. The answers to held-out prompts
decide how many tokens are chosen. See network/draft_vocabulary.py.

Symbols: N, the number of tokens that the draft may propose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlx_t5.training.teacher_answers import joined

STEP = 1024  # N is a multiple of this number by default
ENOUGH = 0.995  # share of the tokens in held-out answers that the chosen tokens must cover


def by_frequency(answers: Sequence[Any], ends: Sequence[int], size: int) -> np.ndarray:
    """All ids below `size`: first the end tokens, then the others by frequency."""
    tokens = joined(answers, np.int64)
    counts = np.bincount(tokens[(tokens >= 0) & (tokens < size)], minlength=size)
    counts[[end for end in ends if end < size]] = len(tokens) + 1
    # Equally frequent ids ascend, because most tokenizers give low ids to common tokens.
    return np.argsort(-counts, kind="stable")


def chosen(
    order: np.ndarray, held_out: Sequence[Any], size: int | None, log: Callable[[str], object]
) -> np.ndarray:
    ids = np.sort(order[: size or smallest(order, held_out)])
    share = f"{coverage(ids, held_out):.1%} of what the target writes to held-out prompts"
    log(f"the draft proposes {len(ids):,} of {len(order):,} tokens: {share}")
    return ids


def coverage(ids: np.ndarray, answers: Sequence[Any]) -> float:
    tokens = joined(answers, np.int64)
    return float(np.isin(tokens, ids).mean()) if len(tokens) else 1.0


def smallest(order: np.ndarray, answers: Sequence[Any]) -> int:
    sizes = range(STEP, len(order), STEP)
    return next((n for n in sizes if coverage(order[:n], answers) >= ENOUGH), len(order))
