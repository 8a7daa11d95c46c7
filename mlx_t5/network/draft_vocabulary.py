"""A draft's own vocabulary: it proposes a few thousand tokens, and its output head has their rows.

A small draft spends most of a pass on its output head, a row for each of V tokens, and texts are
written with few of them. So the head keeps the rows of N tokens (FR-Spec,
https://arxiv.org/abs/2502.14856), and a table says which: `d2t` as in EAGLE-3
(https://arxiv.org/abs/2503.01840), (N,) int32, the target's id of every row, ascending. The target
verifies, so nothing about the output changes; a token that is not among them is never proposed.

The folder of such a draft has `draft_vocab_size` in config.json and the tensor `d2t`. The rows are
there only if they are the draft's own: those of a draft that uses its target's head are taken from
that when it is loaded, in whatever type and however quantised it is.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx, nn
from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from model import T5

TABLE = "d2t"


class DraftVocabulary:
    """The target's tokens that a draft's logits stand for.

    A draft without a table has the first ids, as many as its config says. What the target lacks is
    left out.

    Attributes:
        size: N, how many of the draft's logits count.
        ids: (N,) int32, the token of every row of the draft's head; None if these are the tokens
            themselves.
        rows: (V,) int32, the row of every token there, N if it has none; None likewise.
    """

    def __init__(self, model: T5, vocab_size: int) -> None:
        """Takes a draft, and V of its target.

        Raises:
            UserError: the draft has none of the target's tokens.
        """
        table = getattr(model, TABLE, None)
        ids = np.arange(model.config.vocab_size) if table is None else np.array(table)
        ids = ids[ids < vocab_size].astype(np.int32)
        self.size = len(ids)
        if not self.size:
            raise UserError("vocabularies differ: the draft has none of the target's tokens")
        self.ids: mx.array | None = None
        self.rows: mx.array | None = None
        if self.size < vocab_size:
            rows = np.full(vocab_size, self.size, np.int32)
            rows[ids] = np.arange(self.size)
            self.ids, self.rows = mx.array(ids), mx.array(rows)

    def spread(self, values: mx.array, others: float) -> mx.array:
        """Values (B, T, N) of the draft's tokens as (B, T, V), with `others` for those it lacks."""
        if self.rows is None:
            return values
        spare = mx.pad(values, ((0, 0), (0, 0), (0, 1)), constant_values=others)
        return mx.take(spare, self.rows, axis=-1)


def narrow(draft: T5, ids: np.ndarray) -> None:
    """Has a draft propose these tokens (N,) only; its head becomes one of their rows.

    Raises:
        UserError: `ids` are no table of the draft's tokens.
    """
    draft.config = draft.local_config = replace(draft.config, draft_vocab_size=len(ids))
    draft.d2t = mx.array(ids)
    settle(draft)
    if draft.shares_with is None:
        draft.lm_head = _rows(getattr(draft, "lm_head", draft.shared), draft.d2t)


def widened(draft: T5) -> Any:
    """A draft like one that uses its target's head, with all of the target's tokens again."""
    config = replace(draft.config, draft_vocab_size=None)
    wide = type(draft)(config, shares_with=draft.shares_with)
    wide.decoder = draft.decoder
    return wide


def settle(draft: T5) -> None:
    """Checks the table of a draft, and takes its rows of a head that it shares.

    Raises:
        UserError: an id is there twice, or is none of the vocabulary.
    """
    ids, size = np.array(draft.d2t.astype(mx.int64)), draft.config.vocab_size
    ascending = (np.diff(ids, prepend=-1, append=size) > 0).all()
    if not ascending or not mx.issubdtype(draft.d2t.dtype, mx.integer):
        raise UserError(
            f"the draft's table d2t is not of ascending token ids from 0 to {size - 1}; make the "
            "draft again with distill.py"
        )
    draft.update({TABLE: mx.array(ids.astype(np.int32))})
    if draft.shares_with is not None:
        draft.__dict__["lm_head"] = _rows(getattr(draft, "lm_head", draft.shared), draft.d2t)


def require_all_tokens(model: T5) -> None:
    """Raises `UserError` if the model is a draft with a vocabulary of its own."""
    if getattr(model, TABLE, None) is not None:
        raise UserError(
            f"this model writes {model.config.draft_vocab_size} of {model.config.vocab_size} "
            "tokens only: it is a draft; give it as --draft-model, with its target"
        )


def _rows(head: nn.Module, ids: mx.array) -> nn.Module:
    """An output head of these rows of another, each array contiguous; quantised as that is."""
    rows = copy(head)
    for name in rows.parameters():
        rows[name] = mx.contiguous(head[name][ids])
    mx.eval(rows.parameters())
    return rows
