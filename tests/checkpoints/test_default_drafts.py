"""Tests the table of default drafts, its copy on the page, and the names of targets."""

from pathlib import Path

import pytest

import main
from mlx_t5.checkpoints.default_drafts import DRAFTS, default_draft


def test_the_page_has_the_table():
    rows = []
    for draft in dict.fromkeys(DRAFTS.values()):
        targets = [name.rpartition("/")[2] for name in DRAFTS if DRAFTS[name] == draft]
        rows.append(f"| {', '.join(targets)} | {draft} | ")
    page = (Path(main.__file__).parent / "docs" / "converting.md").read_text("utf-8")
    assert [row for row in rows if row not in page] == []


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
