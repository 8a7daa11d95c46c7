"""Tests the proposals of the draft model drafter, and the tokens that it feeds its model."""

import numpy as np
import pytest

from draws import check_draws, position_keys, settings
from fake_model import EOS, FakeModel, drafter, good, greedy, only, random_table
from mlx_t5.decoder import Engine, SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.network.cache import round_up, source_width
from mlx_t5.sampling.draws import Sampling, row_key
from mlx_t5.sampling.processors import Processing
from mlx_t5.settings import Settings

V = 7
TABLE = random_table(V)
SOURCE = (3, 4)


def sampling(rows, temp=0.0):
    """Returns settings of rows; sampled rows are lenient, because only these need q."""
    return settings(rows, temp=temp, delta=0.1 if temp else 0.0)


def started(draft, sources=(SOURCE,)):
    draft.insert(sources)
    return draft


def continuation(table, seen, count):
    """Returns the tokens that greedy decoding of the table writes after `seen`."""
    seen = list(seen)
    for _ in range(count):
        seen.append(int(np.argmax(table(SOURCE, tuple(seen)))))
    return seen[-count:]


def test_the_draft_proposes_its_own_greedy_continuation():
    draft = started(drafter(TABLE, FakeModel(TABLE, V)))
    proposal = draft.propose([[0]], [4], sampling(1), None)
    assert proposal.tokens.tolist() == [continuation(TABLE, [0], 4)]
    assert proposal.q is None
    assert proposal.lengths == [4]


def test_a_row_with_zero_proposals_gets_none():
    draft = started(drafter(TABLE, FakeModel(TABLE, V)), (SOURCE, SOURCE, SOURCE))
    assert draft.propose([[0]] * 3, [0, 1, 0], sampling(3), None).lengths == [0, 1, 0]
    assert draft.propose([[0]] * 3, [0, 0, 0], sampling(3), None).tokens is None


def test_the_draft_catches_up_with_the_committed_tokens():
    draft = started(drafter(TABLE, FakeModel(TABLE, V)), (SOURCE, SOURCE, SOURCE))
    rows = [[0], [0], [0]]
    first = draft.propose(rows, [3] * 3, sampling(3), None).tokens[0].tolist()
    # Rows with all proposals accepted and one more token, one accepted, and none.
    rows = [[0, *first, 5], [0, first[0], 5], [0, 6]]
    draft.update(rows)
    second = draft.propose(rows, [2] * 3, sampling(3), None)
    assert second.tokens.tolist() == [continuation(TABLE, row, 2) for row in rows]
    # The first row lacks its last proposal and the new token; other rows lack the new token.
    offsets, block = draft.model.calls[3]
    assert offsets == [3, 2, 1]
    assert [row[:1] for row in block[1:]] == [[5], [6]]
    assert block[0] == [first[2], 5]
    # After rejections and steps without a draft there are more tokens to catch up with.
    for token in (2, 3, 4, 5):
        rows = [[*row, token] for row in rows]
        draft.update(rows)
        if token < 5:
            assert draft.propose(rows, [0] * 3, sampling(3), None).tokens is None
    third = draft.propose(rows, [1, 3, 2], sampling(3), None)
    assert third.lengths == [1, 3, 2]
    assert third.tokens.tolist() == [continuation(TABLE, row, 3) for row in rows]


def test_unverified_proposals_are_proposed_again():
    draft = started(drafter(TABLE, FakeModel(TABLE, V)))
    first, second = (draft.propose([[0]], [3], sampling(1), None) for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist() == [continuation(TABLE, [0], 3)]
    assert draft.model.calls[3] == ([0], [[0]])


def test_the_drafts_cache_is_sized_for_the_remaining_rows():
    draft = DraftModel(*(load(BUNDLED / name, "float32")[0] for name in ("draft", "target")))
    engine = Engine(draft.target, draft)
    seventy, more = (Settings(max_tokens=n, min_tokens=n, num_draft=5) for n in (70, 75))
    long = Row([5] * 90 + [EOS], seventy, row_key(0, 0))
    short = Row([9, EOS], more, row_key(0, 1))
    engine.insert([long])
    while long.decided < 66:
        engine.step()
    engine.insert([short])
    assert (draft.cache.source, draft.cache.capacity) == (source_width(91, 1), round_up(96))
    while len(engine.rows) == 2:
        engine.step()
    assert engine.rows == [short]
    for cache in (draft.cache, engine.cache):
        assert (cache.source, cache.capacity) == (source_width(2), 32)


def test_unread_tokens_are_those_of_the_source_and_of_steps_without_a_draft():
    draft = started(drafter(TABLE, FakeModel(TABLE, V)))
    assert draft.unread([[0]]) == [len(SOURCE)]
    draft.propose([[0]], [2], sampling(1), None)
    draft.insert([(2, 3, 4)])
    for text in ([0, 5], [0, 5, 6], [0, 5, 6, 2]):  # the first proposal was rejected
        draft.update([text, [0]])
    assert draft.unread([text, [0]]) == [2, 3]


def test_an_empty_draft_shares_the_model_and_nothing_else():
    draft = started(drafter(TABLE, FakeModel(TABLE, V)))
    other = draft.empty()
    assert other.model is draft.model and (other.cache, other.fed) == (None, [])


def test_sampled_proposals_come_from_q():
    rows = 4000
    draft = started(drafter(TABLE, FakeModel(TABLE, V)), (SOURCE,) * rows)
    proposal = draft.propose([[0]] * rows, [1] * rows, sampling(rows, 1.0), position_keys(rows, 5))
    assert proposal.q.shape == (rows, 1, V)
    logits = TABLE(SOURCE, (0,)).astype(np.float64)
    q = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(proposal.q[0, 0], q, atol=1e-6)
    check_draws(proposal.tokens[:, 0], q)


def test_a_wider_draft_proposes_common_ids_only():
    wide = random_table(V + 3)

    def beyond(source, seen):
        logits = wide(source, seen).copy()
        logits[V:] = 50  # ids that the target does not have are the likeliest
        return logits

    model = FakeModel(TABLE, V)
    draft = started(drafter(beyond, model, V + 3))
    common = lambda source, seen: beyond(source, seen)[:V]  # noqa: E731
    assert draft.propose([[0]], [3], sampling(1), None).tokens.tolist() == [
        continuation(common, [0], 3)
    ]
    q = draft.propose([[0]], [3], sampling(1, 1.0), position_keys(1, 5)).q
    assert q.shape == (1, 3, V)
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-6)


def test_a_narrower_draft_sees_padding_for_ids_it_does_not_have():
    model = FakeModel(TABLE, V)
    draft = started(drafter(random_table(V - 2), model, V - 2), ((3, V - 1),))
    q = draft.propose([[0, V - 1, 2]], [2], sampling(1, 1.0), position_keys(1, 5)).q
    assert draft.cache.sources == [(3, 0)]
    assert draft.model.calls[0][1] == [[0, 0, 2]]
    assert q.shape == (1, 2, V)
    assert q[..., V - 2 :].max().item() == 0
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("width", [V - 2, V, V + 3])
def test_output_is_the_targets_whatever_the_drafts_width(width):
    model = FakeModel(random_table(V, eos_bias=-1), V)
    draft = drafter(random_table(width), model, width)
    source = [3, V - 1]
    decoder = SpeculativeDecoder(model, draft, None, 5)
    result = decoder.generate(source, max_tokens=15)
    assert (result.tokens, result.finish_reason) == greedy(model, source, 15)
    samples = decoder.generate([source] * 20, max_tokens=9, temp=1.0)
    assert any(V - 1 in sample.tokens for sample in samples)
    assert result.stats.drafted and all(sample.stats.drafted for sample in samples)


OWN = [EOS, 2, 5, 6]  # the tokens of a draft with its own vocabulary


def test_a_draft_proposes_only_its_own_vocabulary(monkeypatch):
    """All other logits count as -inf; a greedy step never computes logits of all tokens."""
    target = FakeModel(TABLE, V)
    draft = started(drafter(TABLE, target, d2t=OWN))
    proposal = draft.propose([[0]], [4], sampling(1, 1.0), position_keys(1, 5))
    assert set(proposal.tokens[0].tolist()) <= set(OWN)
    assert proposal.q.shape == (1, 4, V) and proposal.q[..., [0, 3, 4]].max().item() == 0
    np.testing.assert_allclose(proposal.q.sum(-1), 1, atol=1e-6)
    masked = started(drafter(only(TABLE, OWN), target))
    same = masked.propose([[0]], [4], sampling(1, 1.0), position_keys(1, 5))
    assert same.tokens.tolist() == proposal.tokens.tolist()
    draft, wide = started(drafter(TABLE, target, d2t=OWN)), []
    monkeypatch.setattr(draft.vocabulary, "spread", lambda *args: wide.append(args))
    proposal = draft.propose([[0]], [4], sampling(1), None)
    assert proposal.tokens.tolist() == [continuation(only(TABLE, OWN), [0], 4)] and not wide


def test_rules_for_the_text_apply_to_a_vocabulary_of_its_own():
    low = lambda source, seen: TABLE(source, seen) - 99  # noqa: E731
    draft = started(drafter(low, FakeModel(TABLE, V), d2t=OWN))
    settings = [Settings(no_repeat_ngram_size=1, min_tokens=3)]
    greedily = Sampling.of(settings, Processing(settings, [EOS]))
    proposal = draft.propose([[0]], [3], greedily, None)
    assert sorted(proposal.tokens[0].tolist()) == [2, 5, 6]


def test_draft_tokens_that_the_target_lacks_are_never_proposed():
    wide = random_table(V + 3)
    target = FakeModel(TABLE, V)
    draft = started(drafter(wide, target, V + 3, [2, 5, V + 1]))
    assert draft.propose([[0]], [4], sampling(1), None).tokens.max().item() < V
    with pytest.raises(UserError, match="the draft has none of the target's tokens"):
        drafter(wide, target, V + 3, [V, V + 1])


def test_different_special_tokens_make_different_vocabularies():
    target = FakeModel(TABLE, V)
    for name in ("eos_token_id", "decoder_start_token_id"):
        with pytest.raises(UserError, match=f"vocabularies differ: {name} is"):
            DraftModel(FakeModel(good(TABLE), V, **{name: 3}), target)
