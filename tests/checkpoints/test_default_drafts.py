"""Tests the table of default drafts and the names of targets."""

import pytest

from mlx_t5.loading import DEFAULT_DRAFTS as DRAFTS
from mlx_t5.loading import default_draft


def test_a_draft_is_the_small_model_of_its_targets_family():
    for target, draft in DRAFTS.items():
        assert draft == f"{target.rpartition('-')[0]}-small" != target


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("t5-3b", "google-t5/t5-small"),
        ("google-t5/t5-3b", "google-t5/t5-small"),
        ("google/flan-t5-xl", "google/flan-t5-small"),
        ("flan-t5-xl", "google/flan-t5-small"),
        *((name, None) for name in ("flan-t5-small", "stranger/flan-t5-xl", "my-t5", "")),
        ("google/t5-3b", None),
    ],
)
def test_a_name_has_the_draft_of_its_own_publisher(name, draft):
    assert default_draft(name) == draft
