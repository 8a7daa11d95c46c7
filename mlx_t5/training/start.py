"""Checks that a model can be trained, and that training can start from a given draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.errors import UserError
from mlx_t5.network.draft_vocabulary import TABLE, require_all_tokens, with_all_tokens

if TYPE_CHECKING:
    from model import T5

ORIGINAL = "start from the model that it was made of"


def start_from(draft: T5, target: T5, name: str, trained: bool) -> Any:
    """The draft that is trained: `draft`, or a copy that proposes all tokens of the target."""
    if trained:
        require_plain(draft, name)
    DraftModel(draft, target)  # refuses a draft that does not fit
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
