"""Which draft a public model has where nobody names one.

The small model of a family drafts for those of it that read at least ten times as many weights in a
pass (the decoder's and the output head's, by the shapes in their config.json): for t5-large 0.100
of a pass of its own, t5-11b 0.007, flan-t5-xl 0.027, mt5-xl 0.080, byt5-xl 0.078. For the base
models it would be 0.31 to 0.52, for mt5-large and byt5-large 0.24; there, too many proposals would
have to be right for a draft to gain anything.
"""

from __future__ import annotations

from types import MappingProxyType

from mlx_t5.checkpoints.hub import full_id

_FAMILIES = (
    ("google-t5/t5-", ("large", "3b", "11b")),
    ("google/flan-t5-", ("large", "xl", "xxl")),
    ("google/t5-v1_1-", ("large", "xl", "xxl")),
    ("google/mt5-", ("xl", "xxl")),
    ("google/umt5-", ("xl", "xxl")),
    ("google/byt5-", ("xl", "xxl")),
)
# By the Hub id of the target, that of its draft.
DRAFTS = MappingProxyType(
    {f"{family}{size}": f"{family}small" for family, sizes in _FAMILIES for size in sizes}
)
_BY_FOLDER = MappingProxyType({name.rpartition("/")[2]: name for name in DRAFTS})


def default_draft(target: str) -> str | None:
    """The Hub id of a target's draft, None if it has none.

    Args:
        target: its Hub id, also one of old without an owner, or the name of a folder that does not
            say what it was converted from.
    """
    return DRAFTS.get(full_id(_BY_FOLDER.get(target, target)))
