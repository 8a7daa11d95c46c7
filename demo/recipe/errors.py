"""Realistic mistakes in English sentences, each of which has one correction.

The sentence comes with the marks of english.py, so an error knows what a word is where it stands.
Each kind of error has its own function, which returns None where it does not apply. Its docstring
shows what it writes.

An error never takes away what the rest cannot restore: only "a"/"an" is dropped (never "the"), a
finite verb loses its "s" only where the bare form is not a past as well, and a misspelling is near
one word of the lexicon only.
"""

import random
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import chain

from demo.recipe import grammar, lexicon
from demo.recipe.english import (
    ADJECTIVE,
    ADVERB,
    ARTICLE,
    AUXILIARY,
    COUNTED,
    GERUND,
    INFINITIVE,
    MANY,
    PARTICIPLE,
    PARTICLE,
    PAST,
    PLURAL_FORM,
    SUBJECT,
    THIRD,
    TIME,
    TO,
    number,
    past_form,
    plain,
    s_form,
)

Error = Callable[[random.Random, list[str]], list[str] | None]
_FORMS = ("third", "past", "participle", "gerund")
# Verbs of the templates.
_OTHER_VERBS = ("like", "want", "need", "hope", "prefer", "think", "believe", "say", "know")
_OBJECT_CASE = {"I": "me", "he": "him", "she": "her", "we": "us", "they": "them"}
_WRONG_BE = {
    "am": "is",
    "is": "are",
    "are": "is",
    "was": "were",
    "were": "was",
    "has": "have",
    "have": "has",
    "do": "does",
    "does": "do",
}
_WRONG_PREPOSITION = {"on": ("in", "at"), "in": ("on", "at"), "at": ("in", "on")}


@lru_cache(maxsize=1)
def _verbs() -> dict[str, dict[str, str]]:
    """For each form the verb it belongs to: {"third": {"goes": "go"}, "past": ...}."""
    verbs = lexicon.load().verbs
    tables = {kind: {getattr(verb, kind): verb.base for verb in verbs} for kind in _FORMS}
    tables["third"] |= {s_form(base): base for base in _OTHER_VERBS}
    return tables


@lru_cache(maxsize=1)
def _same_past() -> frozenset[str]:
    return frozenset(verb.base for verb in lexicon.load().verbs if verb.same_past)


def _find(words: list[str], kind: str) -> list[int]:
    return [i for i, word in enumerate(words) if kind in word]


def _pick(rng: random.Random, words: list[str], kind: str) -> int | None:
    places = _find(words, kind)
    return rng.choice(places) if places else None


def _replace(words: list[str], i: int, new: str) -> list[str]:
    """Word i becomes `new`, without its mark, keeping capital and punctuation."""
    old, core = plain(words[i]), _core(words[i])
    if core[:1].isupper() and core != "I" or i == 0:
        new = new[:1].upper() + new[1:]
    return words[:i] + [new + old[len(core) :]] + words[i + 1 :]


def _core(word: str) -> str:
    return re.sub(r"[.,?]+$", "", plain(word))


def wrong_verb_form(rng: random.Random, words: list[str]) -> list[str] | None:
    """He eat; they eats; he don't; she have eaten; they was."""
    places = _find(words, THIRD) + _find(words, PLURAL_FORM) + _find(words, AUXILIARY)
    if not places:
        return None
    i = rng.choice(places)
    word = _core(words[i])
    if AUXILIARY in words[i]:
        stem, negation = (word[:-3], "n't") if word.endswith("n't") else (word, "")
        new = _WRONG_BE.get(stem.lower())
        return _replace(words, i, new + negation) if new else None
    if THIRD in words[i]:
        base = _verbs()["third"].get(word)
        return _replace(words, i, base) if base and base not in _same_past() else None
    return _replace(words, i, s_form(word))


def wrong_tense_form(rng: random.Random, words: list[str]) -> list[str] | None:
    """Did not went; has ate; will goes; is go; buyed."""
    kind = rng.choice((INFINITIVE, PARTICIPLE, GERUND, PAST))
    i = _pick(rng, words, kind)
    if i is None:
        return None
    word, tables = _core(words[i]).lower(), _verbs()
    if kind == INFINITIVE:
        if i == 0 or i + 1 < len(words) and _core(words[i - 1]).lower() in ("and", "please"):
            return None
        options = [s_form(word)] + [past for past, base in tables["past"].items() if base == word]
        new = rng.choice(options)
    elif kind == PAST:
        new = past_form(tables["past"].get(word, word))
    elif kind == GERUND:
        new = tables["gerund"].get(word)
    else:  # never the bare form: "have buy" comes from "have to buy"
        base = tables["participle"].get(word, word)
        new = rng.choice([past_form(base)] + [p for p, b in tables["past"].items() if b == base])
    return _replace(words, i, new) if new and new != word else None


def wrong_article(rng: random.Random, words: list[str]) -> list[str] | None:
    """A apple; an book; red car."""
    i = _pick(rng, words, ARTICLE)
    if i is None:
        return None
    if rng.random() < 0.5:
        return _replace(words, i, "an" if _core(words[i]).lower() == "a" else "a")
    return _drop(words, i)


def _drop(words: list[str], i: int) -> list[str]:
    rest = words[:i] + words[i + 1 :]
    if i == 0 and rest:
        rest[0] = rest[0][:1].upper() + rest[0][1:]
    return rest


def wrong_number(rng: random.Random, words: list[str]) -> list[str] | None:
    """Two apple; several shirt."""
    i = _pick(rng, words, COUNTED)
    return None if i is None else _replace(words, i, re.sub("s$", "", _core(words[i])))


def wrong_order(rng: random.Random, words: list[str]) -> list[str] | None:
    """A car red; he eats always; where he is?"""
    if rng.random() < 0.6:
        i = _pick(rng, words, ADJECTIVE)
        if i is None or i + 1 >= len(words) or re.search("[.,?]$", words[i]):
            return None
        return _swap(words, i)
    i = _pick(rng, words, ADVERB)
    if i is None or i + 1 >= len(words) or i == 0:
        return None
    return _swap(words, i)


def _swap(words: list[str], i: int) -> list[str]:
    """Words i and i + 1 change places; punctuation and capital stay where they are."""
    first, second = plain(words[i]), plain(words[i + 1])
    core = _core(words[i + 1])
    if re.search("[.,?]$", words[i]) or core == "I" or first[:1].isupper():
        return None
    return words[:i] + [core, first + second[len(core) :]] + words[i + 2 :]


def doubled_word(rng: random.Random, words: list[str]) -> list[str] | None:
    """The the; to to."""
    places = [i for i, word in enumerate(words) if re.fullmatch("[a-z]+", plain(word))]
    i = rng.choice(places) if places else None
    return None if i is None else words[:i] + [plain(words[i])] + words[i:]


def missing_word(rng: random.Random, words: list[str]) -> list[str] | None:
    """Wants eat; waits Anna; a lot apples."""
    places = _find(words, TO) + _find(words, PARTICLE)
    places += [i + 2 for i in _find(words, MANY) if _core(words[i]).lower() == "a"]
    return _drop(words, rng.choice(places)) if places else None


def wrong_preposition(rng: random.Random, words: list[str]) -> list[str] | None:
    """In Monday; on eight o'clock."""
    i = _pick(rng, words, TIME)
    if i is None:
        return None
    return _replace(words, i, rng.choice(_WRONG_PREPOSITION[_core(words[i]).lower()]))


def wrong_pronoun(rng: random.Random, words: list[str]) -> list[str] | None:
    """Him eats; does they."""
    i = _pick(rng, words, SUBJECT)
    if i is None:
        return None
    word = _core(words[i])
    new = _OBJECT_CASE.get(word if word == "I" else word.lower())
    return _replace(words, i, new) if new and new != "her" else None


def wrong_comparison(rng: random.Random, words: list[str]) -> list[str] | None:
    """More bigger."""
    places = [i for i in _find(words, MANY) if _core(words[i]).endswith("er")]
    if not places:
        return None
    i = rng.choice(places)
    return words[:i] + ["more", plain(words[i])] + words[i + 1 :]


def wrong_writing(rng: random.Random, words: list[str]) -> list[str] | None:
    """No capital, no full stop, no apostrophe."""
    draw = rng.random()
    if draw < 0.35 and words[0][0].isupper() and _core(words[0]).lower() in _lower_words():
        return [words[0][0].lower() + words[0][1:]] + words[1:]
    if draw < 0.7 and words[-1][-1] in ".?":
        return words[:-1] + [words[-1][:-1]]
    places = [i for i, word in enumerate(words) if re.search("n't|Let's|let's", plain(word))]
    return (
        _replace(words, rng.choice(places), _core(words[rng.choice(places)]).replace("'", ""))
        if len(places) == 1
        else None
    )


def misspelled(rng: random.Random, words: list[str]) -> list[str] | None:
    """One word with a letter too many, too few, wrong or out of place."""
    places = [i for i, word in enumerate(words) if re.fullmatch("[a-z]{5,}", _core(word))]
    for _ in range(6):
        if not places:
            return None
        i = rng.choice(places)
        typo = _typo(rng, _core(words[i]))
        if typo and nearest(typo) == {_core(words[i])}:
            return _replace(words, i, typo)
    return None


def _typo(rng: random.Random, word: str) -> str:
    i = rng.randrange(1, len(word) - 1)
    kind = rng.choice(("drop", "double", "swap", "swap", "drop", "vowel"))
    if kind == "drop":
        return word[:i] + word[i + 1 :]
    if kind == "double":
        return word[:i] + word[i] + word[i:]
    if kind == "swap":
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    vowels = [j for j in range(1, len(word)) if word[j] in "aeiou"]
    if not vowels:
        return ""
    j = rng.choice(vowels)
    return word[:j] + rng.choice("aeiou".replace(word[j], "")) + word[j + 1 :]


def _deletions(word: str) -> set[str]:
    return {word[:i] + word[i + 1 :] for i in range(len(word))}


@lru_cache(maxsize=1)
def _lower_words() -> frozenset[str]:
    """Every lower-case English word the grammar can write."""
    lex = lexicon.load()
    texts = [t for noun in chain(*lex.nouns.values()) for t in (noun.en, noun.en_plural)]
    texts += [t for a in chain(*lex.adjectives.values()) for t in (a.en, a.comparative or "")]
    for verb in lex.verbs:
        texts += [getattr(verb, form) for form in ("base", "rest", *_FORMS)]
        texts.append(past_form(verb.base))
    texts += [en for en, _ in chain(*lex.phrases.values())]
    texts += [number(n) for n in range(1000)]
    texts += _seen_words()
    return frozenset(word for text in texts for word in re.findall("[a-z']+", plain(text)))


def _seen_words() -> list[str]:
    """Words that stand in the templates rather than in the lexicon: read off a sample."""
    rng = random.Random(0)
    return [re.sub("^[A-Z]", lambda m: m[0].lower(), grammar.sample(rng).en) for _ in range(3000)]


@lru_cache(maxsize=1)
def _by_deletion() -> dict[str, set[str]]:
    index: dict[str, set[str]] = {}
    for word in _lower_words():
        for key in _deletions(word) | {word}:
            index.setdefault(key, set()).add(word)
    return index


def nearest(typo: str) -> set[str]:
    """The words one letter (missing, extra, wrong or swapped with its neighbour) away."""
    index = _by_deletion()
    return set().union(*(index.get(key, set()) for key in _deletions(typo) | {typo}))


_ERRORS: tuple[tuple[Error, int], ...] = (
    (wrong_verb_form, 6),
    (wrong_tense_form, 4),
    (wrong_article, 4),
    (wrong_number, 3),
    (wrong_order, 3),
    (doubled_word, 2),
    (missing_word, 3),
    (wrong_preposition, 3),
    (wrong_pronoun, 2),
    (wrong_comparison, 3),
    (wrong_writing, 2),
    (misspelled, 7),
)


def corrupt(rng: random.Random, marked: str) -> str:
    """A sentence (with marks) with none to three errors, as plain text."""
    words = marked.split(" ")
    wanted = rng.choices((0, 1, 2, 3), (12, 45, 30, 13))[0]
    makers, weights = zip(*_ERRORS, strict=True)
    for _ in range(20):
        if wanted == 0:
            break
        changed = rng.choices(makers, weights)[0](rng, words)
        if changed:
            words, wanted = changed, wanted - 1
    return plain(" ".join(words))
