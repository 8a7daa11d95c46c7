"""What the demonstration's grammar and its error generator draw, and the held-out split."""

import itertools
import json
import random
import re
from collections import Counter

import pytest

from demo.recipe import corpus, english, errors, grammar, heldout, lexicon
from demo.recipe.english import plain
from demo.recipe.phrases import Words
from main import DEFAULT_PROMPT


@pytest.fixture(scope="module")
def pairs():
    """A few thousand sentences."""
    rng = random.Random(11)
    return [grammar.sample(rng) for _ in range(5000)]


@pytest.fixture
def words():
    """The lexicon with a fixed source of randomness."""
    return Words(random.Random(0))


# -- the sampled distribution --------------------------------------------------------------------


def test_equal_seeds_give_equal_sentences():
    first, second = random.Random(3), random.Random(3)
    assert [grammar.sample(first) for _ in range(50)] == [grammar.sample(second) for _ in range(50)]


def test_one_english_sentence_has_one_translation(pairs):
    translations = {}
    rng = random.Random(12)
    more = [grammar.sample(rng) for _ in range(5000)]
    for pair in pairs + more:
        assert translations.setdefault(pair.en, pair.fr) == pair.fr


def test_lexicon_has_one_french_word_for_an_english_one():
    for entries in (lexicon.load().nouns.values(), lexicon.load().adjectives.values()):
        french_of = {}
        for entry in itertools.chain.from_iterable(entries):
            # "cup" is a thing and a container, "doctor" a role and a profession: the same word
            form = entry.fr if isinstance(entry.fr, str) else entry.fr[0]
            assert french_of.setdefault(entry.en, form) == form


def test_sentences_have_5_to_40_words_and_end_properly(pairs):
    for pair in pairs:
        assert 5 <= len(pair.en.split()) <= 40
        assert pair.en[0].isupper() and pair.fr[0].isupper()
        assert (pair.en[-1], pair.fr[-1]) in ((".", "."), ("?", "?"))
        assert not re.search(r"[\ue000-\ue0ff]", pair.en + pair.fr)


def test_sentences_vary(pairs):
    assert len({pair.en for pair in pairs}) > 0.98 * len(pairs)
    lengths = Counter(len(pair.en.split()) // 10 for pair in pairs)
    assert lengths[0] and lengths[1] and lengths[2]


@pytest.mark.parametrize(
    "wrong",
    [
        r"\bà les?\b",
        r"(?<!besoin )(?<!vien[st] )(?<!venons )(?<!venez )(?<!viennent )(?<!avant )"
        r"\bde le\b",
        r"(?<![-\w])(je|ne|me|se|le|la|que) [aeouéèêiî]",
        r"\bde [aeouéèêiî]\w",
        r"\b(ma|sa) [aeouéèêiî]",
        r"\bun [a-zé]+e rouge",
        r"  ",
        r" [,.]",
        r"\bde des\b",
        r"\bde du\b",
    ],
)
def test_french_has_no_telltale_mistake(pairs, wrong):
    guilty = [
        p.fr
        for p in pairs
        if (m := re.search(wrong, p.fr))
        and "-" not in m[0]
        and not re.search(r"\bde (onze|un à)", m[0] + p.fr[m.end() : m.end() + 4])
    ]
    assert guilty == []


# -- errors --------------------------------------------------------------------------------------


def test_corrupted_text_is_no_other_valid_sentence_and_has_one_correction(pairs):
    rng = random.Random(5)
    valid, original = {pair.en for pair in pairs}, {}
    unchanged = 0
    for pair in pairs:
        corrupted = errors.corrupt(rng, pair.marked)
        unchanged += corrupted == pair.en
        assert corrupted == pair.en or corrupted not in valid
        assert original.setdefault(corrupted, pair.en) == pair.en
        assert not re.search(r"[\ue000-\ue0ff]", corrupted)
    assert 0.08 < unchanged / len(pairs) < 0.25


def test_each_kind_of_error_occurs_and_changes_the_sentence(pairs):
    rng = random.Random(6)
    for make, _ in errors._ERRORS:
        changed = 0
        for pair in pairs[:1500]:
            result = make(rng, pair.marked.split(" "))
            if result is not None:
                changed += 1
                if make is not errors.misspelled:  # may swap two equal letters
                    assert plain(" ".join(result)) != pair.en, make.__name__
        assert changed > 5, make.__name__


@pytest.mark.parametrize(
    ("make", "marked", "wrong"),
    [
        (errors.wrong_verb_form, f"He eats{english.THIRD} bread.", "He eat bread."),
        (errors.wrong_verb_form, f"He isn't{english.AUXILIARY} here.", "He aren't here."),
        (errors.wrong_number, f"Two apples{english.COUNTED}.", "Two apple."),
        (errors.missing_word, f"He wants to{english.TO} eat.", "He wants eat."),
        (errors.wrong_comparison, f"It is bigger{english.MANY}.", "It is more bigger."),
        (errors.wrong_pronoun, f"He{english.SUBJECT} eats.", "Him eats."),
        (errors.wrong_verb_form, f"They read{english.PLURAL_FORM} it.", "They reads it."),
        (errors.wrong_verb_form, f"He reads{english.THIRD} it.", None),  # "he read": a past
        (errors.wrong_number, "Two apples.", None),  # no mark, no error
    ],
)
def test_errors_by_the_letter(make, marked, wrong):
    result = make(random.Random(0), marked.split(" "))
    assert wrong == (result and plain(" ".join(result)))


def test_misspelling_is_near_one_word_only():
    assert errors.nearest("appel") == {"apple"}
    assert len(errors.nearest("applse")) > 1  # apple or apples


def test_errors_are_deterministic(pairs):
    first = [errors.corrupt(random.Random(i), p.marked) for i, p in enumerate(pairs[:100])]
    assert first == [errors.corrupt(random.Random(i), p.marked) for i, p in enumerate(pairs[:100])]


# -- corpus --------------------------------------------------------------------------------------


def english_of(example: corpus.Example) -> str:
    return (
        example.source.removeprefix(corpus.TRANSLATE)
        if example.task == "translate"
        else example.target
    )


def test_held_out_sentences_are_never_trained_on():
    trained = {english_of(e) for e in itertools.islice(corpus.examples("a"), 1000)}
    held = {english_of(e) for e in itertools.islice(corpus.examples("b", held_out=True), 60)}
    assert not trained & held
    assert all(corpus.is_held_out(s) for s in held)
    assert not any(corpus.is_held_out(s) for s in trained)


def test_default_sentence_is_of_the_grammar_and_held_out(words):
    assert DEFAULT_PROMPT == corpus.TRANSLATE + corpus.DEFAULT_SENTENCE
    assert corpus.is_held_out(corpus.DEFAULT_SENTENCE)
    shape = re.compile(
        r"Let's go to the store and buy some groceries including "
        r"\w+, \w+, and \w+\."
    )
    assert shape.fullmatch(corpus.DEFAULT_SENTENCE)
    rng = random.Random(1)
    found = next(p for p in iter(lambda: grammar.sample(rng), None) if shape.fullmatch(p.en))
    assert re.fullmatch(
        r"Allons au magasin et achetons des provisions, notamment (\S+ [^,]+), (\S+ [^,]+) et "
        r"(\S+ .+)\.",
        found.fr,
    )


# -- heldout.jsonl -------------------------------------------------------------------------------


def test_heldout_pairs_are_distinct_and_of_both_tasks_in_turn():
    records = [json.loads(line) for line in heldout.lines(20)]
    assert [record["task"] for record in records] == ["translate", "fix"] * 20
    assert len({record["prompt"] for record in records}) == 40
    for record in records:
        example = corpus.Example(record["task"], record["prompt"], record["target"])
        assert corpus.is_held_out(english_of(example))


def test_heldout_file_is_what_the_recipe_writes():
    written = heldout.FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(written) == 2 * heldout.COUNT
    assert written[:400] == list(heldout.lines(200)), "all of them take the recipe half a minute"
