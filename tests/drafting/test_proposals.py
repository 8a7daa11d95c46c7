"""Offers, and how much of them is taken."""

from mlx_t5.drafting.draft_model import DRAFT
from mlx_t5.drafting.proposals import NOTHING, Choice, Kind, Offer, Proposal
from mlx_t5.drafting.source_copy import COPY


def test_a_draft_has_as_many_tokens_as_are_wanted_and_a_copy_what_there_is():
    draft, copied = Offer(DRAFT), Offer(COPY, [7, 8])
    assert [draft.most(n) for n in (0, 1, 9)] == [0, 1, 9]
    assert [copied.most(n) for n in (0, 1, 9)] == [0, 1, 2]
    assert copied.first(9) == Choice(copied, 2) and draft.first(9) == Choice(draft, 9)


def test_only_drafts_take_passes():
    choices = (Offer(DRAFT).first(3), Offer(COPY, [7, 8]).first(3), NOTHING)
    assert [choice.drafted for choice in choices] == [3, 0, 0]


def test_a_kind_says_what_is_expected_before_anything_was_seen():
    assert Kind("one", 3.0, 1.0).alpha == 0.75
    assert (DRAFT.writer, COPY.writer) == ("draft", "copy")


def test_no_proposal_for_any_row():
    nothing = Proposal.nothing(2)
    assert nothing.tokens is None and nothing.q is None
    assert nothing.lengths == nothing.valid_lengths.tolist() == [0, 0]
