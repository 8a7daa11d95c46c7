"""Compares sampled sequences with the exact distribution, enumerated prefix by prefix.

The expected distribution is computed in float64 from the tables of the fake models. At
delta = 0 it is the target's own, for any draft and any number of proposals. At delta > 0 a drafted
position follows the mixture (1 - delta) p + delta q, and the token that the target adds after
a full step follows p. The expected distribution is therefore computed step by step.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from draws import many_keys, total_variation_bound
from fake_model import (
    EOS,
    START,
    FakeModel,
    always,
    contrary,
    drafter,
    good,
    only,
    random_table,
    without,
)
from kinds import processed
from mlx_t5.backend import mx
from mlx_t5.decoder import Engine
from mlx_t5.drafting.costs import StepCosts
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import COPY, Alignment, SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.sampling import draws
from mlx_t5.settings import Settings

V, MAX_TOKENS, DRAWS = 5, 3, 3_000
SOURCE = (2, 3)
TABLE = random_table(V, seed=3)
NO_FOUR = without(TABLE, 4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Divides the vocabulary into three blocks; a block of 128 tokens would be mostly padding."""
    monkeypatch.setattr(draws, "BLOCK", 2)


def law(table, seen, temp, top_k, top_p):
    """Returns p(. | seen) in float64, after temperature, top-k and top-p."""
    logits = table(SOURCE, seen).astype(np.float64) / temp
    order = np.argsort(-logits)
    p = np.exp(logits - logits.max())
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    in_front = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[order[in_front >= top_p]] = 0
    return p / p.sum()


def expected(target, draft, num_draft, delta, **sampling):
    """Returns {sequence: probability} of the texts that the engine should write."""
    outcome = Counter()

    def walk(seen, probability, count):
        """Adds the outcomes after `seen`, with `count` proposals of the block yet to be judged."""
        if len(seen) > 1 and seen[-1] == EOS or len(seen) > MAX_TOKENS:
            outcome[seen[1:]] += probability
            return
        if count is None:  # a new block: one token a step is the target's own
            count = min(num_draft, MAX_TOKENS - len(seen))
        p = law(target, seen, **sampling)
        if count == 0 or draft(SOURCE, seen) is None:
            for token in np.flatnonzero(p):
                walk((*seen, int(token)), probability * p[token], None)
            return
        q = law(draft, seen, **sampling)
        keep = np.minimum(q, (1 - delta) * p + delta * q)
        rest = np.maximum(p - q, 0)
        rest *= (1 - keep.sum()) / max(rest.sum(), 1e-300)
        for token in range(V):
            for mass, remaining in ((keep[token], count - 1), (rest[token], None)):
                if mass > 0:
                    walk((*seen, token), probability * mass, remaining)

    walk((START,), 1.0, None)
    return outcome


def sampled(target, make, num_draft, draws=DRAWS, **settings):
    """Returns {sequence: count} from the engine, with one batch of rows of the same prompt."""
    model = FakeModel(target, V)
    engine = Engine(model, *make(model))
    settings = Settings(MAX_TOKENS, num_draft=num_draft, **settings)
    prediction = PREDICTION if make is nothing else ()
    rows = [Row(list(SOURCE), settings, key, prediction=prediction) for key in many_keys(draws)]
    engine.insert(rows)
    while engine.rows:
        engine.step()
    return Counter(tuple(row.tokens[1:]) for row in rows)


def distance(seen, exact):
    """Returns the total variation relative to the bound for fair draws."""
    draws = sum(seen.values())
    variation = sum(abs(seen[s] / draws - exact[s]) for s in exact | seen) / 2
    return variation / total_variation_bound(exact.values(), draws)


def compare(seen, exact):
    """Asserts that counted sequences look as if drawn with the exact probabilities."""
    assert sum(exact.values()) == pytest.approx(1)
    assert set(seen) <= set(exact), "a sequence was written that has probability 0"
    assert distance(seen, exact) < 1


def modeled(table, ids=None):
    """Returns a maker of draft models; `ids` limits the draft's tokens."""
    return lambda model: (drafter(table, model, d2t=ids),)


def copying(source, seen, likely_only=False):
    """Returns the law of copied proposals: all mass on the next aligned token, None without one."""
    alignment = Alignment(source, 0)
    alignment.follow(seen[1:])
    copy = alignment.find(1)
    has_proposal = copy.tokens and (copy.kind is COPY or not likely_only)
    return always(copy.tokens[0], V)(source, seen) if has_proposal else None


PREDICTION = (4, 2, 3)


def nothing(model):
    """Makes no draft and no drafter; the rows have a prediction in this case."""
    return ()


def predicted(source, seen):
    """Returns the law of tokens copied from the prediction, None without a copy."""
    alignment = Alignment((), 0, PREDICTION)
    alignment.follow(seen[1:])
    copy = alignment.find(1)
    return always(copy.tokens[0], V)(source, seen) if copy.tokens else None


def copying_or_good(source, seen):
    """Returns the law of a copy after a strong match, else the draft model's law."""
    copied = copying(source, seen, likely_only=True)
    return GOOD(source, seen) if copied is None else copied


def first_only(otherwise):
    """Returns a good draft's law for the first token and `otherwise` for later tokens."""
    return lambda source, seen: GOOD(source, seen) if len(seen) == 1 else otherwise


GOOD = good(TABLE)
LIKELIEST = int(np.argmax(TABLE(SOURCE, (START,))))
# The tokens of drafts with their own vocabularies, named by the missing tokens.
VOCABULARIES = {
    "the likeliest token": [t for t in range(V) if t != LIKELIEST],
    "EOS": [t for t in range(V) if t != EOS],
    "all but one": [3],
}
PLAIN = {"temp": 1.0, "top_k": 0, "top_p": 1.0}
NAN = np.full(V, np.nan, np.float32)
# Target, law of the proposals, maker of draft and drafter, and number of proposals.
CASES = {
    "draft = target": (TABLE, TABLE, modeled(TABLE), 2),
    "good draft": (TABLE, GOOD, modeled(GOOD), 2),
    "good draft, three": (TABLE, GOOD, modeled(GOOD), 3),
    "disagrees everywhere": (TABLE, contrary(TABLE), modeled(contrary(TABLE)), 2),
    "always EOS": (TABLE, always(EOS, V), modeled(always(EOS, V)), 2),
    "p = 0 where q = 1": (NO_FOUR, always(4, V), modeled(always(4, V)), 2),
    "copies": (TABLE, copying, lambda model: (None, SourceCopy()), 2),
    "prediction": (TABLE, predicted, nothing, 2),
    **{
        f"own vocabulary without {name}": (TABLE, only(GOOD, ids), modeled(GOOD, ids), 2)
        for name, ids in VOCABULARIES.items()
    },
    # One proposal a step, so that a row's behavior depends on its tokens alone.
    "copies beside drafts": (
        TABLE, copying_or_good, lambda model: (drafter(GOOD, model), SourceCopy()), 1,
    ),
    # It proposes nothing there, so the step ends with the proposals before.
    "draft whose logits break": (TABLE, first_only(None), modeled(first_only(NAN)), 2),
}  # fmt: skip
# The kinds that are tested with delta = 1, where every proposal is kept.
LENIENT = ("good draft", "copies beside drafts", "own vocabulary without the likeliest token")
EVERY = [(case, delta) for case in CASES for delta in (0.0, 0.3)] + [(c, 1.0) for c in LENIENT]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "delta"), EVERY)
def test_sequences_follow_the_exact_distribution(case, delta):
    target, law, make, num_draft = CASES[case]
    exact = expected(target, law, num_draft, delta, **PLAIN)
    compare(sampled(target, make, num_draft, delta=delta, **PLAIN), exact)
    if delta == 0:  # which is the target's own distribution without a draft
        alone = expected(target, law, 0, 0.0, **PLAIN)
        assert all(exact[s] == pytest.approx(alone[s]) for s in exact | alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"temp": 0.6, "top_k": 3, "top_p": 1.0},
        {"temp": 1.5, "top_k": 0, "top_p": 0.8},
        {"temp": 1.0, "top_k": 4, "top_p": 0.7},
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        "good draft",
        "disagrees everywhere",
        "p = 0 where q = 1",
        "own vocabulary without the likeliest token",
    ],
)
def test_sequences_follow_the_law_after_temperature_top_k_and_top_p(case, sampling):
    target, law, make, num_draft = CASES[case]
    exact = expected(target, law, num_draft, 0.0, **sampling)
    compare(sampled(target, make, num_draft, **sampling), exact)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["good draft", "disagrees everywhere", "copies", "prediction"])
def test_sequences_follow_the_law_when_candidates_fall_short_of_top_p(case, monkeypatch):
    monkeypatch.setattr(draws, "CANDIDATES", 2)
    target, law, make, num_draft = CASES[case]
    flat = {"temp": 1.5, "top_k": 0, "top_p": 0.8}
    exact = expected(target, law, num_draft, 0.0, **flat)
    compare(sampled(target, make, num_draft, **flat), exact)


def fading(tokens, logits):
    """Returns logits that depend on the last token and on the number of tokens."""
    return logits - 0.8 * tokens.shape[0] * (mx.arange(V) == tokens[-1])


RULES = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_tokens": 2}


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize(
    ("rules", "draws"),
    [
        (RULES, DRAWS),
        ({"no_repeat_ngram_size": 1}, DRAWS),
        (
            {"bad_words_ids": [[2, 3], [4, 4]], "suppress_tokens": [5], "forced_bos_token_id": 2},
            DRAWS,
        ),
        ({"logits_processors": (fading,), "min_tokens": 1}, 800),  # called for every row
    ],
)
def test_with_processors_the_law_is_that_of_the_processed_target(rules, draws, delta):
    exact = expected(processed(TABLE, rules), processed(GOOD, rules), 2, delta, **PLAIN)
    compare(sampled(TABLE, modeled(GOOD), 2, draws, delta=delta, **PLAIN, **rules), exact)


class Unprocessed(DraftModel):
    """A draft whose logits the rules do not change."""

    def propose(self, tokens, lengths, sampling, keys):
        return super().propose(tokens, lengths, replace(sampling, processing=None), keys)


UNLIKE = {
    "not processed": lambda model: (Unprocessed(FakeModel(GOOD, V), model),),
    "not processed, always EOS": lambda model: (Unprocessed(FakeModel(always(EOS, V), V), model),),
    **{f"without {name}": modeled(GOOD, ids) for name, ids in VOCABULARIES.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("draft", UNLIKE)
def test_with_processors_the_law_is_kept_whatever_the_draft(draft):
    exact = expected(processed(TABLE, RULES), None, 0, 0.0, **PLAIN)
    compare(sampled(TABLE, UNLIKE[draft], 2, **PLAIN, **RULES), exact)


@pytest.mark.slow
@pytest.mark.parametrize("table", [GOOD, contrary(TABLE)], ids=["good", "disagrees everywhere"])
def test_adaptive_numbers_of_proposals_keep_the_law(table, monkeypatch):
    lengths = []

    def seconds(self, rows, positions, passes, sampled=False):
        return 1 + 0.1 * np.add(positions, passes)

    monkeypatch.setattr(StepCosts, "expected", seconds)

    def make(model):
        draft = drafter(table, model)
        propose = draft.propose

        def watched(tokens, numbers, *args):
            lengths.extend(numbers)
            return propose(tokens, numbers, *args)

        draft.propose = watched
        return (draft,)

    compare(sampled(TABLE, make, "auto", **PLAIN), expected(TABLE, None, 0, 0.0, **PLAIN))
    assert lengths


def test_a_wrong_rule_exceeds_the_bound():
    """The bound is tight enough to detect a rule that keeps every proposal."""
    counts = sampled(TABLE, modeled(GOOD), 2, delta=1.0, **PLAIN)
    assert distance(counts, expected(TABLE, GOOD, 2, 0.0, **PLAIN)) > 1
