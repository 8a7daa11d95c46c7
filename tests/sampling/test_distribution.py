"""Whole sampled sequences against the exact distribution, enumerated prefix by prefix.

The expected distribution is worked out here in float64 from the tables of the fake models. At
delta = 0 it is the target's own, whatever the draft and its length. At delta > 0 a drafted
position follows the mixture (1 - delta) p + delta q and a position that the target wrote after
a full block follows p, so the expectation walks through the blocks too.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from decoder import Engine
from draws import total_variation_bound
from fake_model import EOS, START, FakeModel, always, contrary, drafter, good, random_table, without
from mlx_t5.backend import mx
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import Alignment, CopyOrDraft, SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.draws import fold, row_key
from mlx_t5.sampling.processors import History, Processing
from mlx_t5.settings import Settings

V, MAX_TOKENS, DRAWS = 5, 3, 5_000
SOURCE = (2, 3)
TABLE = random_table(V, seed=3)
NO_FOUR = without(TABLE, 4)


def law(table, seen, temp, top_k, top_p):
    """p(. | seen) in float64, after temperature, top-k and top-p."""
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
    """{sequence: probability} of what the engine should write."""
    outcome = Counter()

    def walk(seen, probability, left):
        """`left` proposals of the running block are still to be judged."""
        if len(seen) > 1 and seen[-1] == EOS or len(seen) > MAX_TOKENS:
            outcome[seen[1:]] += probability
            return
        if left is None:  # a new block: one token a step is the target's own
            left = min(num_draft, MAX_TOKENS - len(seen))
        p = law(target, seen, **sampling)
        if left == 0 or draft(SOURCE, seen) is None:
            for token in np.flatnonzero(p):
                walk((*seen, int(token)), probability * p[token], None)
            return
        q = law(draft, seen, **sampling)
        keep = np.minimum(q, (1 - delta) * p + delta * q)
        rest = np.maximum(p - q, 0)
        rest *= (1 - keep.sum()) / max(rest.sum(), 1e-300)
        for token in range(V):
            for mass, remaining in ((keep[token], left - 1), (rest[token], None)):
                if mass > 0:
                    walk((*seen, token), probability * mass, remaining)

    walk((START,), 1.0, None)
    return outcome


def sampled(target, draft, num_draft, delta, make=drafter, draws=DRAWS, **sampling):
    """The same, from the engine: one batch of rows of the same prompt."""
    model = FakeModel(target, V)
    engine = Engine(model, make(draft, model))
    settings = Settings(MAX_TOKENS, delta=delta, num_draft=num_draft, **sampling)
    keys = fold(mx.broadcast_to(row_key(0, 0), (draws, 2)), mx.arange(draws), 0)
    rows = [Row(list(SOURCE), settings, key) for key in keys]
    engine.insert(rows)
    while engine.rows:
        engine.step()
    return Counter(tuple(row.committed[1:]) for row in rows)


def check(target, draft, num_draft, delta, make=drafter, **sampling):
    exact = expected(target, draft, num_draft, delta, **sampling)
    compare(sampled(target, draft, num_draft, delta, make, **sampling), exact)
    return exact


def compare(seen, exact):
    """That counted sequences look as if drawn with the exact probabilities."""
    assert sum(exact.values()) == pytest.approx(1)
    assert set(seen) <= set(exact), "a sequence was written that has probability 0"
    draws = sum(seen.values())
    distance = sum(abs(seen[s] / draws - exact[s]) for s in exact) / 2
    assert distance < total_variation_bound(len(exact), draws)


PLAIN = {"temp": 1.0, "top_k": 0, "top_p": 1.0}
CASES = {
    "draft = target": (TABLE, TABLE),
    "good draft": (TABLE, good(TABLE)),
    "disagrees everywhere": (TABLE, contrary(TABLE)),
    "always EOS": (TABLE, always(EOS, V)),
    "p = 0 where q = 1": (NO_FOUR, always(4, V)),
}


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_sequences_follow_the_exact_distribution(case, delta):
    target, draft = CASES[case]
    exact = check(target, draft, 2, delta, **PLAIN)
    if delta == 0:  # and that is the target's own, without any draft
        alone = expected(target, draft, 0, 0.0, **PLAIN)
        assert all(exact[s] == pytest.approx(alone[s]) for s in exact | alone)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft", [1, 3])
def test_the_length_of_the_draft_does_not_matter(num_draft):
    check(TABLE, good(TABLE), num_draft, 0.0, **PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"temp": 0.6, "top_k": 3, "top_p": 1.0},
        {"temp": 1.5, "top_k": 0, "top_p": 0.8},
        {"temp": 1.0, "top_k": 4, "top_p": 0.7},
    ],
)
@pytest.mark.parametrize("case", ["good draft", "disagrees everywhere", "p = 0 where q = 1"])
def test_after_temperature_top_k_and_top_p(case, sampling):
    check(*CASES[case], 2, 0.0, **sampling)


def copying(source, seen):
    """The law of copied proposals: all mass on the next token of the alignment, if there is one."""
    alignment = Alignment(source, 0)
    alignment.follow(seen[1:])
    copy = alignment.find(1)
    return always(copy.tokens[0], V)(source, seen) if copy else None


def copying_or_good(source, seen):
    """A copy after strong matches, the draft model's law otherwise."""
    alignment = Alignment(source, 0)
    alignment.follow(seen[1:])
    copy = alignment.find(1)
    likely = copy and copy.kind == "copy"
    return (always(copy.tokens[0], V) if likely else good(TABLE))(source, seen)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_with_copied_proposals(delta):
    def make(_, model):
        return SourceCopy()

    check(TABLE, copying, 2, delta, make, **PLAIN)


@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_with_copies_beside_drafts(delta):
    """One proposal a step, so that what a row does is a function of its tokens alone."""

    def make(_, model):
        return CopyOrDraft(SourceCopy(), drafter(good(TABLE), model))

    check(TABLE, copying_or_good, 1, delta, make, **PLAIN)


@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_with_a_draft_whose_logits_break_in_the_middle_of_a_block(delta):
    """It proposes nothing there, and what came before is judged as a block that ends there."""
    draft = good(TABLE)

    def broken(source, seen):
        return draft(source, seen) if len(seen) == 1 else np.full(V, np.nan, np.float32)

    def short(source, seen):
        return draft(source, seen) if len(seen) == 1 else None

    exact = expected(TABLE, short, 2, delta, **PLAIN)
    compare(sampled(TABLE, broken, 2, delta, **PLAIN), exact)


def fading(tokens, logits):
    """A processor that depends on the last token and on how many there are."""
    return logits - 0.8 * tokens.shape[0] * (mx.arange(V) == tokens[-1])


def processed(table, rules):
    """The law of a model whose logits come out processed."""
    processing = Processing.of([Settings(**rules)], [EOS])

    def new(source, seen):
        logits = mx.array(table(source, seen))[None, None]
        return np.array(processing(History.align([seen]), logits, [1]))[0, 0]

    return lru_cache(maxsize=None)(new)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize(
    ("rules", "draws"),
    [
        ({"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_tokens": 2}, DRAWS),
        ({"no_repeat_ngram_size": 1}, DRAWS),
        ({"logits_processors": (fading,), "min_tokens": 1}, 800),  # called for every row
    ],
)
def test_with_processors_the_law_is_that_of_the_processed_target(rules, draws, delta):
    draft = good(TABLE)
    exact = expected(processed(TABLE, rules), processed(draft, rules), 2, delta, **PLAIN)
    seen = sampled(TABLE, draft, 2, delta, draws=draws, **PLAIN, **rules)
    compare(seen, exact)


@pytest.mark.slow
def test_the_law_is_kept_where_the_draft_is_not_processed():
    rules = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_tokens": 2}

    class Unprocessed(DraftModel):
        def propose(self, committed, chosen, sampling, keys):
            return super().propose(committed, chosen, replace(sampling, processing=None), keys)

        def fresh(self):
            return Unprocessed(self.model, self.target)

    def make(draft, model):
        return Unprocessed(FakeModel(draft, V), model)

    exact = expected(processed(TABLE, rules), None, 0, 0.0, **PLAIN)
    for draft in (good(TABLE), always(EOS, V)):
        compare(sampled(TABLE, draft, 2, 0.0, make, **PLAIN, **rules), exact)


def test_a_wrong_rule_would_be_seen():
    """The bound is tight enough: keeping every proposal is told apart from the target's law."""
    target, draft = CASES["good draft"]
    kept = sampled(target, draft, 2, 1.0, **PLAIN)
    exact = expected(target, draft, 2, 0.0, **PLAIN)
    distance = sum(abs(kept[s] / DRAWS - exact[s]) for s in exact | kept) / 2
    assert distance > total_variation_bound(len(exact), DRAWS)
