"""Tests where a text that repeats itself ends, on literals and against the definition."""

import numpy as np
import pytest

from mlx_t5.settings import Repetition
from mlx_t5.text.documents import smaller_parts
from mlx_t5.text.repetition import most_copies, uncertain, until_repetition


@pytest.mark.parametrize(
    ("tokens", "new", "detection", "expected"),
    [
        ([], [7, 7, 7], (4, 1, 3), (3, 2)),
        ([7], [7, 7, 5], (4, 1, 3), (2, 2)),
        ([9, 5, 6, 5], [6, 5, 6, 5], (4, 1, 3), (3, 4)),
        ([5, 6, 7] * 3, [5], (2, 1, 3), (1, 0)),  # the pattern is too long
        ([7, 7, 7], [7, 7, 7, 7, 7, 7], (4, 3, 3), (6, 6)),  # "7" is too short
        ([5, 6, 5, 6, 5, 7], [5, 6], (4, 1, 3), (2, 0)),
        ([5, 6], [5, 6], (9, 1, 2), (2, 2)),
        ([5, 6] * 9, [5, 6], (0, 0, 2), (2, 0)),  # off
        # Patterns of 1, 2 and 3 tokens are complete at once: the shortest counts.
        ([7] * 8, [7], (3, 1, 3), (1, 2)),
        ([7] * 8, [7], (3, 2, 3), (1, 4)),
        ([7] * 8, [7], (2**31, 1, 2**31), (1, 0)),
    ],
)
def test_a_text_ends_with_the_token_that_completes_the_copies(tokens, new, detection, expected):
    assert until_repetition(tokens, new, Repetition(*detection)) == expected


def test_min_tokens_stay():
    for least, expected in ((1, (3, 2)), (2, (4, 2)), (5, (7, 2)), (8, (9, 0))):
        assert until_repetition([], [7] * 9, Repetition(4, 1, 3), least) == expected


def repeats(tokens, size, count):
    """Whether tokens end in so many copies of a pattern, by the definition."""
    return len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count


@pytest.mark.parametrize("seed", range(40))
def test_tokens_go_only_if_they_were_uncertain_before(seed):
    rng = np.random.default_rng(seed)
    detection = Repetition(
        int(rng.integers(1, 5)), int(rng.integers(0, 2)), int(rng.integers(2, 5))
    )
    tokens = rng.integers(0, 2 + seed % 2, 40).tolist()
    end, copies = until_repetition([], tokens, detection)
    for count in range(1, end + 1):
        sizes = [s for s in detection.sizes(99) if repeats(tokens[:count], s, detection.min_count)]
        gone = min(sizes, default=0) * (detection.min_count - 1)
        assert gone == (copies if count == end else 0)
        held = uncertain(tokens[:count], detection)
        assert held <= (detection.min_count - 1) * detection.max_pattern_size
        assert count - held <= end - copies


def test_tokens_are_held_back_while_they_repeat_those_before_them():
    tokens = [5, 6, 5, 6, 5, 8, 8, 9]
    held = [uncertain(tokens[:count], Repetition(2, 1, 4)) for count in range(len(tokens) + 1)]
    assert held == [0, 0, 0, 1, 2, 3, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("", 1),
        ("We open bottles.", 2),  # "tt"
        ("Ha ha, ha ha HA!", 5),
        ("Hahahaha", 4),
        ("哈哈哈哈哈！", 5),
        ("Contents ........ 5", 8),
        ("We want bread, we want bread, we want bread and we want bread", 3),
        ("Who is there? Who is there? Who is there? Who is there?", 4),
    ],
)
def test_what_a_source_repeats_is_counted_by_words_and_characters(text, copies):
    assert most_copies(text) == copies


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (" Yes, he came; 1,000 did: ", ["Yes,", "he came;", "1,000 did:"]),
        ("The old man laughed again.", ["The old man", "laughed again."]),
        ("Mann, 12, …", []),  # one part with a letter
        ("他来了，我走了。", ["他来了，", "我走了。"]),
        ("他来了我走了", ["他来了", "我走了"]),
        ("Donaudampfschifffahrt.", []),
        ("", []),
    ],
)
def test_a_piece_is_cut_at_clause_marks_or_else_between_words(text, parts):
    assert [text[start:end] for start, end in smaller_parts(text)] == parts
