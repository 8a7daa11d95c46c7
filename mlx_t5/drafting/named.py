"""The drafters that --draft-model knows by name: NAME+DRAFTER uses a draft and a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_t5.drafting.proposals import Drafter


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that users can choose.

    Attributes:
        does: what it does, for messages.
        path: "module:class"; not imported here, as names are read before MLX is imported. The class
            is called with the target's tokenizer, which may be None.
    """

    does: str
    path: str


DRAFTERS = {
    "lookup": NamedDrafter("copying from the source", "mlx_t5.drafting.source_copy:SourceCopy")
}


def make_drafter(name: str, tokenizer: Any) -> Drafter:
    """Returns the drafter of this name."""
    return resolve_name(DRAFTERS[name].path)(tokenizer)


def split_name(draft_model: str) -> tuple[str, str]:
    """Splits a value of --draft-model into the names of a draft and of a drafter, or ""."""
    name, _, drafter = draft_model.rpartition("+")
    return (name, drafter) if drafter in DRAFTERS else (draft_model, "")
