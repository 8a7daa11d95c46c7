"""Copying from the source follows an alignment and does not change the target's text."""

import numpy as np
import pytest

from fake_model import EOS, FakeModel
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.source_copy import (
    COPY,
    FIRST_COPY,
    FIRST_PREDICTION,
    PREDICTION,
    WEAK_COPY,
    WEAK_PREDICTION,
    Alignment,
    SourceCopy,
    count_predicted,
)
from mlx_t5.errors import UserError

V = 40
A, B, C, D, E, F, G, X, Y, Z = range(10, 20)
SENTENCE = [A, B, C, D, E, F, G, EOS]


def ahead(source, output, length=3, begin=0):
    alignment = Alignment(source, begin)
    alignment.follow(output)
    return list(alignment.find(length).tokens)


def test_the_first_tokens_need_no_match():
    assert ahead(SENTENCE, []) == [A, B, C]
    assert ahead([8, 9, *SENTENCE], [], begin=2) == [A, B, C]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([A, B], [C, D, E]),  # plain copying
        ([A, X], [C, D, E]),  # X replaces B
        ([A, X, C], [D, E, F]),
        ([A, B, X, C], [D, E, F]),  # X is inserted
        ([A, B, X, Y, Z, C, D], [E, F, G]),  # a longer insertion
        ([A, D], [E, F, G]),  # B and C are left out
        ([A, X, E], [F, G, EOS]),  # X replaces several tokens
        ([E, F, A], [B, C, D]),  # parts swap places
        ([A, B, C, D, E, F, G], [EOS]),
        ([A, B, C, D, E, F, G, X, Y], []),  # past the end of the source
    ],
)
def test_copying_resumes_where_the_source_resumes(output, expected):
    assert ahead(SENTENCE, output) == expected


def test_the_longest_match_is_preferred_and_then_the_nearest():
    # "B C" occurs three times; the tokens before it decide between the places.
    source = [A, B, C, D, X, B, C, E, Y, B, C, F, EOS]
    assert ahead(source, [X, B, C], 1) == [E]
    assert ahead(source, [Y, B, C], 1) == [F]
    assert ahead(source, [A, B, C], 1) == [D]
    # After an insertion both places of B match alike, so the one after the alignment is used.
    assert ahead(source, [A, B, C, D, Z, B, C], 1) == [E]


def test_copying_resumes_at_the_best_match_of_the_whole_source():
    def agreement(a, b):
        equal = [x == y for x, y in zip(reversed(a), reversed(b), strict=False)][:8]
        return [*equal, False].index(False)

    rng = np.random.default_rng(0)
    for _ in range(50):
        source, output = rng.integers(0, 8, 40).tolist(), rng.integers(0, 8, 20).tolist()
        alignment = Alignment(source, 0)
        for n, token in enumerate(output, 1):
            place = alignment.place
            alignment.follow([token])
            if source[place : place + 1] != [token]:
                matches = {i: agreement(source[:i], output[:n]) for i in range(1, 41)}
                nearest = max(matches, key=lambda i: (matches[i], -abs(i - 1 - place), i))
                assert alignment.place == (nearest if matches[nearest] else place + 1)


def test_phrases_of_the_output_are_copied_when_they_recur():
    output = [20, 21, 22, 23, 24, 25, 20, 21, 22]
    assert ahead(SENTENCE, output) == [23, 24, 25]
    # Two equal tokens are too few for a match.
    assert ahead(SENTENCE, [20, 21, 22, 30, 20, 21])[:1] != [22]


def test_copies_are_likely_where_half_of_the_last_four_tokens_were_copies():
    def kind(output):
        alignment = Alignment(SENTENCE, 0)
        alignment.follow(output)
        return alignment.find(1).kind

    assert [kind(SENTENCE[:n]) for n in range(4)] == [FIRST_COPY, COPY, COPY, COPY]
    assert kind([X]) == WEAK_COPY
    assert kind([X, B]) == COPY
    assert kind([A, B, X]) == COPY  # one edit
    assert kind([A, B, X, Y]) == COPY
    assert kind([A, B, X, Y, Z]) == WEAK_COPY
    assert kind([A, X, Y, Z, D]) == WEAK_COPY
    # A phrase that recurs in the output counts as much.
    assert kind([20, 21, 22, 23, 24, 25, 20, 21, 22]) == COPY


def predicted(prediction, output, source=(), length=3):
    alignment = Alignment(source, 0, prediction)
    alignment.follow(output)
    copy = alignment.find(length)
    return (copy.kind, copy.tokens) if copy.tokens else None


def test_a_prediction_is_read_from_its_beginning_and_found_again():
    assert predicted(SENTENCE, []) == (FIRST_PREDICTION, [A, B, C])
    assert predicted(SENTENCE, [A, B]) == (PREDICTION, [C, D, E])
    assert predicted(SENTENCE, [A, B, X]) == (PREDICTION, [D, E, F])  # a replacement
    assert predicted(SENTENCE, [A, B, X, C]) == (PREDICTION, [D, E, F])  # an insertion
    assert predicted(SENTENCE, [X, Y, Z, D]) == (WEAK_PREDICTION, [E, F, G])  # one match
    assert predicted(SENTENCE, [X]) is None  # nothing matches
    assert predicted(SENTENCE, [*SENTENCE[:-1]]) == (PREDICTION, [EOS])
    assert predicted(SENTENCE, SENTENCE[:-1] + [X]) is None
    assert Alignment([8, 9, A], 2, [X, Y]).find(2).tokens == [X, Y], "a source with a prefix"
    # Only the prediction is copied.
    assert predicted(SENTENCE, [20, 21, 22, 23, 20, 21, 22]) is None


@pytest.mark.parametrize(
    "text, counts",
    [
        (SENTENCE[:-1], (7, 7)),
        ([A, B], (2, 2)),  # the rest of the prediction is not reached
        ([A, X, C, D], (4, 3)),  # one is replaced
        ([A, B, X, Y, C, D], (4, 4)),  # two are inserted
        ([A, B, F, G], (7, 4)),  # three are left out
        ([E, F, A, B, E, F], (6, 4)),  # parts swap places, and one is written twice
        ([X, Y, Z], (3, 0)),
        ([X] * 20, (7, 0)),
        ([], (0, 0)),
    ],
)
def test_predicted_tokens_in_a_text_are_counted(text, counts):
    assert count_predicted(SENTENCE[:-1], text) == counts


def test_copies_come_from_the_prediction_before_the_source():
    source = [X, Y, Z, C, 20, EOS]
    assert predicted(SENTENCE, [A], source) == (PREDICTION, [B, C, D])
    assert predicted(SENTENCE, [X], source) == (WEAK_COPY, [Y, Z, C])
    assert predicted(SENTENCE, [X, Y, Z, C], source) == (COPY, [20, EOS])
    # A copy from the prediction does not continue in the source.
    assert predicted([A, B], [A], source, 5) == (PREDICTION, [B])
    assert predicted([A, B], [20, 21, 22, 23, 20, 21, 22], source) == (COPY, [23, 20, 21])


def test_a_task_prefix_is_skipped():
    class Vocabulary:
        def convert_ids_to_tokens(self, token):
            return {3: "▁fix", 4: "▁gram", 5: "mar:"}.get(token, "▁word")

        def decode(self, tokens, **_):
            return "".join(map(self.convert_ids_to_tokens, tokens)).replace("▁", " ")

    sources = [[3, 4, 5, A, B, EOS], [A, B, EOS], [A] * 30 + [5, B]]
    for copy in (SourceCopy(Vocabulary()), SourceCopy(Vocabulary()).empty()):
        copy.insert(sources, [()] * 3)
        assert [alignment.place for alignment in copy.alignments] == [3, 0, 0]


def editing_table(seed, change=0.25):
    """Returns the table of a target that copies its source with occasional edits of all kinds."""

    def table(source, seen):
        rng = np.random.default_rng((seed, *source, 999, *seen))
        logits = rng.normal(0, 0.5, V).astype(np.float32)
        alignment = Alignment(source, 0)
        alignment.follow(seen[1:])
        place = alignment.place + (rng.random() < change / 3)  # may leave a token out
        token = source[place] if place < len(source) else EOS
        if rng.random() < change:
            token = int(rng.integers(20, V))  # replaces or inserts
        logits[token] += 6
        return logits

    return table


SOURCES = [SENTENCE, [A, B, A, B, C, A, B, EOS], [X, EOS], list(range(10, 38)) + [EOS]]


def test_copying_pays_where_the_output_follows_the_source():
    model = FakeModel(editing_table(7, change=0.1), V)
    decoder = SpeculativeDecoder(model, SourceCopy(), None, 5)
    stats = [result.stats for result in decoder.generate(SOURCES[3:] * 2, reuse=False)]
    assert all(s.tokens_per_call > 2 for s in stats)
    assert all(s.speculation.copied == s.drafted for s in stats)
    assert all(s.speculation.copied_accepted == s.accepted for s in stats)


def test_only_one_drafter_is_accepted():
    model = FakeModel(editing_table(7), V)
    assert SpeculativeDecoder(model, copy=SourceCopy()).copy
    with pytest.raises(UserError, match="are drafters; give only one"):
        SpeculativeDecoder(model, SourceCopy(), copy=SourceCopy())
