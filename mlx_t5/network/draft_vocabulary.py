"""A draft's own vocabulary: the few thousand tokens that it can propose.

A small draft spends most of a pass on its output head, which has a row per token. But texts use few
tokens, so the head keeps only the rows of N tokens (FR-Spec, https://arxiv.org/abs/2502.14856).
Their ids, ascending, are in a table `d2t` (N,) int32, as EAGLE-3 calls it
(https://arxiv.org/abs/2503.01840). The target verifies all proposals, so the output stays the same.

The folder of such a draft stores rows of the head only if the head is the draft's own. Otherwise
loading selects the rows from its target's head, whatever its type or quantization.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx, nn
from mlx_t5.errors import UserError
from mlx_t5.installation import command

if TYPE_CHECKING:
    from mlx_t5.model import T5

TABLE = "d2t"


class DraftVocabulary:
    """Maps a draft's N logits to the V tokens of its target; tokens it lacks are left out."""

    def __init__(self, model: T5, vocab_size: int) -> None:
        table = getattr(model, TABLE, None)
        ids = np.arange(model.config.vocab_size) if table is None else np.array(table)
        ids = ids[ids < vocab_size].astype(np.int32)
        self.size = len(ids)
        if not self.size:
            raise UserError("vocabularies differ: the draft has none of the target's tokens")
        self.ids: mx.array | None = None  # (N,) the token of each logit; None if N = V
        self.rows: mx.array | None = None  # (V,) the logit of each token; N if it has none
        if self.size < vocab_size:
            rows = np.full(vocab_size, self.size, np.int32)
            rows[ids] = np.arange(self.size)
            self.ids, self.rows = mx.array(ids), mx.array(rows)

    def spread(self, values: mx.array, default: float) -> mx.array:
        """Maps the last axis from logits to tokens; tokens without a logit get `default`."""
        if self.rows is None:
            return values
        spare = mx.pad(values, ((0, 0), (0, 0), (0, 1)), constant_values=default)
        return mx.take(spare, self.rows, axis=-1)


def narrow(draft: T5, ids: np.ndarray) -> None:
    """Restricts a draft, in place, to the ascending tokens `ids`."""
    draft.config = replace(draft.config, draft_vocab_size=len(ids))
    draft.d2t = mx.array(ids)
    apply_table(draft)
    if draft.shares_with is None:
        draft.lm_head = _rows(getattr(draft, "lm_head", draft.shared), draft.d2t)


def with_all_tokens(draft: T5) -> Any:
    """A draft with the decoder of `draft` and the whole head of the target that it shares."""
    config = replace(draft.config, draft_vocab_size=None)
    wide = type(draft)(config, shares_with=draft.shares_with)
    wide.decoder = draft.decoder
    return wide


def apply_table(draft: T5) -> None:
    """Checks a draft's table; keeps only its rows of a head that belongs to the target."""
    ids, size = np.array(draft.d2t.astype(mx.int64)), draft.config.vocab_size
    # Below 0 and from `size` on no id would ascend, so this checks the range, too.
    ascending = (np.diff(ids, prepend=-1, append=size) > 0).all()
    if not ascending or not mx.issubdtype(draft.d2t.dtype, mx.integer):
        cause = f"the draft's table d2t is not of ascending token ids from 0 to {size - 1}"
        raise UserError(f"{cause}; make the draft again with {command('distill')}")
    draft.update({TABLE: mx.array(ids.astype(np.int32))})
    if draft.shares_with is not None:
        draft.__dict__["lm_head"] = _rows(getattr(draft, "lm_head", draft.shared), draft.d2t)


def require_all_tokens(model: T5) -> None:
    if getattr(model, TABLE, None) is not None:
        tokens = f"{model.config.draft_vocab_size} of {model.config.vocab_size} tokens only"
        cure = "give it as --draft-model, with its target"
        raise UserError(f"this model writes {tokens}: it is a draft; {cure}")


def _rows(head: nn.Module, ids: mx.array) -> nn.Module:
    rows = copy(head)
    for name in rows.parameters():
        rows[name] = mx.contiguous(head[name][ids])
    mx.eval(rows.parameters())
    return rows
