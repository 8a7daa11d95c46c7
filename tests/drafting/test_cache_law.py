"""What the caches hold after every step, whatever is proposed and whoever is in the batch.

The target's cache of a row is exactly committed[:-1], the draft's a prefix of committed. The drafts
here disagree with the target and with the copies, so that a guess of theirs that stays in a cache
is told apart from what was written instead.
"""

import pytest

from decoder import Engine
from fake_model import EOS, FakeModel, always, contrary, drafter, good, random_table
from mlx_t5.cli import models as pair
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.network.cache import source_width
from mlx_t5.requests import Settings
from mlx_t5.sampling.draws import row_key
from model import load

V = 12
RANDOM = random_table(V, eos_bias=-1.0)
FOLLOWING = 2  # a source that begins with this is repeated by the target, mostly
# The first and the third copy while the others ask the draft.
SOURCES = [[FOLLOWING, *range(3, 12)] * 2, [4, 5, 6], [FOLLOWING, 7, 9, 11, 3, 5], [3] * 9, [5]]
NUM_DRAFT = [4, 2, 1, 6, 3]


def table(source, seen):
    logits, place = RANDOM(source, seen).copy(), len(seen) - 1
    if source[0] == FOLLOWING:
        logits[source[place] if place < len(source) else EOS] += 4
    return logits


DRAFTS = {
    "good": good(RANDOM),
    "disagrees everywhere": contrary(table),
    "always the same": always(8, V),
    "always ends": always(EOS, V),
}
TARGET = FakeModel(table, V)
TARGET.encoder = object()
DRAFT_MODELS = {name: drafter(draft, TARGET).model for name, draft in DRAFTS.items()}


class SharedDraft(FakeModel):
    """It uses the target's encoder, and so must not be asked to encode."""

    shares_with, encode = TARGET, None


KINDS = {
    "draft": lambda draft: draft,
    "shared draft": lambda draft: draft,
    "copy": lambda draft: SourceCopy(),
    "copy or draft": lambda draft: CopyOrDraft(SourceCopy(), draft),
}


def engine_of(kind, draft):
    model = SharedDraft(DRAFTS[draft], V) if kind == "shared draft" else DRAFT_MODELS[draft]
    draft = DraftModel(model, TARGET)
    return Engine(TARGET, KINDS[kind](draft)), draft


def rows(temp, **settings):
    return [
        Row(list(source), Settings(temp=temp, num_draft=n, **settings), row_key(3, i))
        for i, (source, n) in enumerate(zip(SOURCES, NUM_DRAFT, strict=True))
    ]


def check(engine, draft):
    for i, row in enumerate(engine.rows):
        assert engine.cache.slots[i][: row.decided] == row.committed[:-1]
        if draft.fed:
            # What the draft was fed last may go on past what the target kept of it.
            true = min(draft.fed[i], row.decided)
            assert draft.cache.slots[i][:true] == row.committed[:true]


def finish(engine, draft):
    while engine.rows:
        engine.step()
        check(engine, draft)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_caches_hold_what_was_committed(kind, draft, temp):
    engine, model = engine_of(kind, draft)
    many = rows(temp, max_tokens=20)
    engine.insert(many[:2])
    for row in many[2:]:  # they join while others run, so no two are of one length
        engine.step()
        check(engine, model)
        engine.insert([row])
    finish(engine, model)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kind", ["draft", "copy", "copy or draft"])
def test_a_row_is_written_as_if_it_were_alone(kind, draft, temp):
    together = rows(temp, max_tokens=20)
    engine, model = engine_of(kind, draft)
    engine.insert(together)
    finish(engine, model)
    for row, alone in zip(together, rows(temp, max_tokens=20), strict=True):
        engine, model = engine_of(kind, draft)
        engine.insert([alone])
        finish(engine, model)
        assert (alone.committed, alone.writers) == (row.committed, row.writers)


def test_the_batch_above_copies_and_drafts_in_one_step():
    """Otherwise the tests above would show little."""
    engine, _ = engine_of("copy or draft", "disagrees everywhere")
    engine.insert(rows(0.0, max_tokens=20))
    propose, mixed = engine.drafter.propose, []

    def watched(*args):
        proposal = propose(*args)
        pairs = zip(proposal.writers, proposal.lengths, strict=True) if proposal else ()
        mixed.append({"copy", "draft"} <= {writer for writer, length in pairs if length})
        return proposal

    engine.drafter.propose = watched
    while engine.rows:
        engine.step()
    assert sum(mixed) > 5


def test_the_drafts_cache_is_as_large_as_the_rows_that_are_left_need():
    draft = DraftModel(*(load(pair.BUNDLED / name, "float32")[0] for name in ("draft", "target")))
    engine = Engine(draft.target, draft)
    long = Row([5] * 90 + [EOS], Settings(max_tokens=70, min_tokens=70), row_key(0, 0))
    short = Row([9, EOS], Settings(max_tokens=75, min_tokens=75), row_key(0, 1))
    engine.insert([long])
    while long.decided < 66:
        engine.step()
    engine.insert([short])
    assert (draft.cache.source, draft.cache.capacity) == (source_width(91), 96)
    while len(engine.rows) == 2:
        engine.step()
    assert engine.rows == [short]
    for cache in (draft.cache, engine.cache):
        assert (cache.source, cache.capacity) == (source_width(2), 32)


PROMPTS = [
    "fix grammar: The childrens plays in the garden every days.",
    "translate English to French: The old teacher reads a long letter in the kitchen.",
    "fix grammar: He have bought two red car for him sister yesterday.",
    "translate English to French: Two doctors talk about the weather.",
    "fix grammar: We was walking slow to the station when it begin to rain.",
    "translate English to French: Why does she not open the window?",
]


def test_a_sampled_text_of_the_bundled_pair_is_the_same_alone_and_in_a_batch(decoder):
    seeds = list(range(2 * len(PROMPTS)))
    options = {"max_tokens": 40, "temp": 1.0, "num_draft": 5}
    together = decoder.generate(PROMPTS * 2, seed=seeds, batch_size=6, **options)
    written = {writer for result in together for writer in result.writers}
    assert written == {"copy", "draft", "target"}
    for prompt, seed, result in zip(PROMPTS * 2, seeds, together, strict=True):
        alone = decoder.generate(prompt, seed=seed, **options)
        assert (alone.tokens, alone.writers) == (result.tokens, result.writers), prompt
