"""Prepares training: checks the model, and chooses the tokens that a new draft may propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlx_t5.drafting.draft_model import check_pair
from mlx_t5.errors import UserError
from mlx_t5.model import T5
from mlx_t5.network.draft_vocabulary import TABLE, require_all_tokens, with_all_tokens
from mlx_t5.training.teacher_answers import joined

ORIGINAL = "start from the model that it was made of"
STEP = 1024  # a draft's vocabulary has a multiple of this number of tokens by default
ENOUGH = 0.995  # share of the tokens in held-out answers that it must cover


def start_from(draft: T5, target: T5, name: str, trained: bool) -> Any:
    """The draft that is trained: `draft`, or a copy that proposes all tokens of the target."""
    if trained:
        require_plain(draft, name)
    check_pair(draft, target)
    size, needed = draft.config.vocab_size, target.config.vocab_size
    if trained and size < needed:
        raise UserError(
            f"{name} has {size} token ids and the target {needed}: it could not learn all; start "
            "from another model"
        )
    if TABLE not in draft:
        return draft
    if draft.shares_with is None:
        head = f"the output head of {name} has {draft.config.draft_vocab_size} tokens only"
        raise UserError(f"{head}; {ORIGINAL}")
    return with_all_tokens(draft)


def require_texts(model: T5, tokenizer: Any, name: str) -> None:
    if tokenizer is None:
        raise UserError(f"{name} has no tokenizer, and prompts are texts; add its files")
    if not model.can_decode:
        raise UserError(f"{name} is an encoder alone; give a model that decodes")
    require_all_tokens(model)


def require_plain(model: T5, name: str) -> None:
    if any("scales" in layer for _, layer in model.named_modules()):
        raise UserError(f"{name} is quantized, and such weights cannot be trained; {ORIGINAL}")


def frequent_tokens(
    answers: Sequence[Any],
    held_out: Sequence[Any],
    ends: Sequence[int],
    vocab_size: int,
    size: int | None,
    log: Callable[[str], object],
) -> np.ndarray:
    """The ids that a draft may propose: the end tokens and the most frequent ones of `answers`.

    Without a `size` they cover the answers to held-out prompts (network/draft_vocabulary.py).
    """
    tokens, other = joined(answers, np.int64), joined(held_out, np.int64)
    counts = np.bincount(tokens[(tokens >= 0) & (tokens < vocab_size)], minlength=vocab_size)
    counts[[end for end in ends if end < vocab_size]] = len(tokens) + 1
    # Equally frequent ids ascend, because most tokenizers give low ids to common tokens.
    order = np.argsort(-counts, kind="stable")

    def coverage(size: int) -> float:
        return float(np.isin(other, order[:size]).mean()) if len(other) else 1.0

    sizes = range(STEP, vocab_size, STEP)
    size = size or next((n for n in sizes if coverage(n) >= ENOUGH), vocab_size)
    ids = np.sort(order[:size])
    share = f"{coverage(size):.1%} of what the target writes to held-out prompts"
    log(f"the draft proposes {len(ids):,} of {vocab_size:,} tokens: {share}")
    return ids
