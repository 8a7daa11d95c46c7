"""The default draft of public models: the family's "small", where it pays.

It pays where a pass of the small decoder and head reads at most a tenth of the target's: 0.100 for
t5-large, 0.007 for t5-11b, 0.027 for flan-t5-xl, 0.080 for mt5-xl, 0.078 for byt5-xl; but 0.24 for
mt5-large and byt5-large, and 0.31 to 0.52 for the base models.
"""

from __future__ import annotations

from mlx_t5.checkpoints.hub import full_id

_FAMILIES = (
    ("google-t5/t5-", ("large", "3b", "11b")),
    ("google/flan-t5-", ("large", "xl", "xxl")),
    ("google/t5-v1_1-", ("large", "xl", "xxl")),
    ("google/mt5-", ("xl", "xxl")),
    ("google/umt5-", ("xl", "xxl")),
    ("google/byt5-", ("xl", "xxl")),
)
# The Hub id of a target → the Hub id of its draft.
DRAFTS = {f"{family}{size}": f"{family}small" for family, sizes in _FAMILIES for size in sizes}
_BY_FOLDER = {name.rpartition("/")[2]: name for name in DRAFTS}


def default_draft(target: str) -> str | None:
    """The draft's Hub id, given the target's or, without one, the name of the target's folder."""
    return DRAFTS.get(full_id(_BY_FOLDER.get(target, target)))
