"""The default draft models of public models.

Each family's model "small" is the draft model for a larger model of the family if a pass of the
small decoder reads at most a tenth of the weights that a pass of the larger decoder reads. The
output head counts as part of the decoder, and the sizes follow from the shapes in config.json. The
ratio of the sizes is 0.100 for t5-large, 0.007 for t5-11b, 0.027 for flan-t5-xl, 0.080 for mt5-xl
and 0.078 for byt5-xl. Base models (0.31 to 0.52), mt5-large and byt5-large (both 0.24) have no
default draft model, because it would need an improbably high acceptance rate.
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
# The Hub id of a target → the Hub id of its draft.
DRAFTS = MappingProxyType(
    {f"{family}{size}": f"{family}small" for family, sizes in _FAMILIES for size in sizes}
)
_BY_FOLDER = MappingProxyType({name.rpartition("/")[2]: name for name in DRAFTS})


def default_draft(target: str) -> str | None:
    """Returns the Hub id of a target model's default draft model; None if there is none.

    Args:
        target: the target model's Hub id, possibly an old id without an owner; or, if the model's
            folder does not record its origin, the folder's name.
    """
    return DRAFTS.get(full_id(_BY_FOLDER.get(target, target)))
