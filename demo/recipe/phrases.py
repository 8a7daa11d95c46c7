"""Noun phrases: English and French side by side.

A noun phrase knows how it changes under negation ("some bread" -> "any bread", "du pain" ->
"de pain") and after "de" ("besoin de pain"), and what agrees with it.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace

from demo.recipe import french, lexicon
from demo.recipe.english import ADJECTIVE, MANY, SUBJECT, article, join_list, mark, number
from demo.recipe.lexicon import Action, Adjective, Noun

Bilingual = tuple[str, str]
SPACE, COMMA = (" ", " "), (", ", ", ")
SINGULAR_KIN = ("mother", "father", "husband", "grandmother", "grandfather")
COUNT_MODES = (
    "the",
    "the",
    "a",
    "a",
    "a",
    "the+",
    "some+",
    "some+",
    "number+",
    "my",
    "my",
    "my+",
    "this",
    "this+",
    "several+",
    "many+",
    "few+",
    "owner",
)
MASS_MODES = ("the", "some", "some", "some", "my", "this", "lot", "measure", "enough")
_QUANTITIES = {
    "lot": ("a lot of", "beaucoup de"),
    "enough": ("enough", "assez de"),
    "several": ("several", "plusieurs"),
    "few": ("a few", "quelques"),
}
_MANY = (("many", "beaucoup de"), ("a lot of", "beaucoup de"), ("too many", "trop de"))


def concat(*parts: Bilingual) -> Bilingual:
    """The parts one after the other, in each language separately."""
    return "".join(en for en, _ in parts), "".join(fr for _, fr in parts)


@dataclass(frozen=True)
class NounPhrase:
    """English and French text with person (index as in french.py), gender and number."""

    en: str
    fr: str
    person: int = 1
    gender: str = "m"
    plural: bool = False
    kind: str = ""
    en_negative: str = ""
    fr_negative: str = ""
    after_de: str = ""
    negatable: bool = True
    joined: tuple["NounPhrase", ...] = ()

    def with_a(self) -> str:
        """French "à" + this; each of two joined phrases takes it."""
        return " et ".join(french.with_a(part.fr) for part in self.joined or (self,))

    def with_de(self) -> str:
        """French "de" + this; each of two joined phrases takes it."""
        if self.joined:
            return " et ".join(part.with_de() for part in self.joined)
        return "de " + self.after_de if self.after_de else french.with_de(self.fr)

    def after(self, words: str) -> str:
        """French words + this; "de" or "à" at their end contracts with the article."""
        lead, _, last = words.rpartition(" ")
        if last in ("de", "à"):
            return f"{lead} {self.with_de() if last == 'de' else self.with_a()}".strip()
        return f"{words} {self.fr}".strip()

    def silent(self) -> "NounPhrase":
        """The same subject unsaid; what agrees with it still does."""
        return replace(self, en="", fr="")


class Words:
    """The lexicon with a source of randomness: what every part of the grammar draws from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lexicon = lexicon.load()

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def phrase(self, section: str) -> Bilingual:
        """One (English, French) entry of phrases.txt."""
        return self.rng.choice(self.lexicon.phrases[section])

    def verb(self, base: str) -> Action:
        """The transitive verb with this English infinitive."""
        return next(a for a in self.lexicon.actions["transitive"] if a.en.base == base)

    def noun(self, *classes: str) -> Noun:
        """One noun, each class being equally likely."""
        return self.rng.choice(self.lexicon.of_class(self.rng.choice(classes)))


def adjective_for(
    g: Words, classes: Collection[str], section: str = "attribute"
) -> Adjective | None:
    """An adjective that makes sense with what belongs to these classes."""
    fitting = [a for a in g.lexicon.adjectives[section] if not a.classes.isdisjoint(classes)]
    return g.rng.choice(fitting) if fitting else None


def _group(noun: Noun, many: bool, adjective: Adjective | None, counted: bool) -> Bilingual:
    """Noun with adjective, without determiner."""
    en, fr = (noun.en_plural, noun.fr_plural) if many else (noun.en, noun.fr)
    if many and counted:
        en = noun.en_counted
    if adjective:
        en = f"{mark(adjective.en, ADJECTIVE)} {en}"
        form = adjective.form(noun.gender, many, fr if adjective.before else "")
        fr = f"{form} {fr}" if adjective.before else f"{fr} {form}"
    return en, fr


def noun_phrase(
    g: Words, noun: Noun, mode: str = "", adjective: Adjective | None = None, modify: float = 0.3
) -> NounPhrase:
    """A noun with determiner and perhaps an adjective; `mode` as in COUNT_MODES, "" for any."""
    if not mode:
        mode = g.rng.choice(MASS_MODES if noun.mass else COUNT_MODES)
    if noun.mass or noun.kind == "kin" and noun.en in SINGULAR_KIN:
        mode = mode.rstrip("+")
    many = mode.endswith("+")
    mode = mode.rstrip("+")
    if adjective is None and g.chance(modify) and noun.kind != "kin":
        adjective = adjective_for(g, noun.classes)
    counted = mode in ("number", "several", "many", "few")
    en, fr = _group(noun, many, adjective, counted)
    base = NounPhrase(en, fr, 4 if many else 1, noun.gender, many, noun.kind)
    if mode in ("the", "my", "this", "owner"):
        return _specific(g, mode, base)
    return _unspecific(g, mode, base, noun, adjective)


def _specific(g: Words, mode: str, base: NounPhrase) -> NounPhrase:
    en, fr, many, gender = base.en, base.fr, base.plural, base.gender
    if mode == "the":
        return replace(base, en="the " + en, fr=f"{french.definite(gender, many)} {fr}")
    if mode == "this":
        word = g.rng.choice(("these", "those") if many else ("this", "that"))
        return replace(base, en=f"{word} {en}", fr=f"{french.demonstrative(gender, many, fr)} {fr}")
    if mode == "my":
        owner = g.rng.choice(
            ("my", "her", "your") if en == "husband" else tuple(french.POSSESSIVES)
        )
        return replace(
            base, en=f"{owner} {en}", fr=f"{french.possessive(owner, gender, many, fr)} {fr}"
        )
    owner = name(g) if g.chance(0.6) else noun_phrase(g, g.noun("kin"), "my", modify=0)
    return replace(
        base, en=f"{owner.en}'s {en}", fr=f"{french.definite(gender, many)} {fr} {owner.with_de()}"
    )


def _unspecific(
    g: Words, mode: str, base: NounPhrase, noun: Noun, adjective: Adjective | None
) -> NounPhrase:
    en, fr, gender = base.en, base.fr, base.gender
    negative = {"fr_negative": "de " + fr}
    if mode == "a":
        one = "une" if gender == "f" else "un"
        return replace(base, en=article(en), fr=f"{one} {fr}", en_negative=article(en), **negative)
    if mode == "measure" and (measured := _measure(g, noun)):
        return measured
    if mode in ("some", "measure"):
        some = french.partitive(fr, gender)
        if base.plural:
            some = f"{'de' if adjective and adjective.before else 'des'} {fr}"
        negative["en_negative"] = "any " + en
        return replace(base, en="some " + en, fr=some, after_de=fr, **negative)
    if mode == "number":
        n = g.rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 10, 12, g.rng.randint(11, 99)))
        return replace(base, en=f"{number(n)} {en}", fr=f"{french.number(n, gender)} {fr}")
    # "several" and "few" draw as well: a seed shall go on giving the sentences that it gave.
    drawn = g.rng.choice(_MANY) if mode in ("several", "few", "many") else ("", "")
    english, quantity = _QUANTITIES.get(mode, drawn)
    return replace(
        base,
        en=f"{mark(english, MANY) if english == 'a lot of' else english} {en}",
        fr=f"{quantity} {fr}",
        negatable=mode not in ("several", "few"),
    )


def _measure(g: Words, noun: Noun) -> NounPhrase | None:
    """ "a bottle of milk", "three kilos of rice": None where no container fits."""
    fitting = [c for c in g.lexicon.nouns["container"] if not noun.classes.isdisjoint(c.members)]
    if not fitting:
        return None
    mode = "a" if g.chance(0.6) else "number+"
    outer = noun_phrase(g, g.rng.choice(fitting), mode, modify=0)
    negative = outer.fr_negative and f"{outer.fr_negative} de {noun.fr_plural}"
    return replace(
        outer,
        en=f"{outer.en} of {noun.en_plural}",
        fr=f"{outer.fr} de {noun.fr_plural}",
        fr_negative=negative,
        en_negative=outer.en_negative and f"{outer.en_negative} of {noun.en_plural}",
    )


def bare(noun: Noun) -> NounPhrase:
    """ "eggs", "bread" -> "des œufs", "du pain": a member of a list."""
    fr = french.partitive(noun.fr, noun.gender) if noun.mass else "des " + noun.fr_plural
    return NounPhrase(
        noun.en_plural,
        fr,
        1 if noun.mass else 4,
        noun.gender,
        not noun.mass,
        noun.kind,
        after_de=noun.fr_plural,
    )


def generic(noun: Noun) -> NounPhrase:
    """ "apples" -> "les pommes", after a verb of liking."""
    fr = f"{french.definite(noun.gender, not noun.mass)} {noun.fr_plural}"
    return NounPhrase(
        noun.en_plural, fr, 1 if noun.mass else 4, noun.gender, not noun.mass, noun.kind
    )


def name(g: Words) -> NounPhrase:
    """A person's name."""
    section = g.rng.choice(("woman", "man"))
    en, fr = g.phrase(section)
    return NounPhrase(en, fr, 1, "f" if section == "woman" else "m", False, "name")


def both(first: NounPhrase, second: NounPhrase) -> NounPhrase:
    """Two noun phrases joined by "and"."""
    gender = "f" if first.gender == second.gender == "f" else "m"
    return NounPhrase(
        f"{first.en} and {second.en}",
        f"{first.fr} et {second.fr}",
        4,
        gender,
        True,
        first.kind,
        joined=(first, second),
    )


def several(items: list[NounPhrase]) -> NounPhrase:
    """A list, with a serial comma in English and none in French."""
    fr = [item.fr for item in items]
    joined = ", ".join(fr[:-1]) + " et " + fr[-1]
    return NounPhrase(
        join_list([item.en for item in items]), joined, 4, "m", True, items[0].kind, negatable=False
    )


def different_nouns(g: Words, classes: tuple[str, ...]) -> list[Noun]:
    """Two to four nouns of these classes."""
    nouns: list[Noun] = []
    size = g.rng.randint(2, 4)
    while len(nouns) < size:
        noun = g.noun(*classes)
        if noun not in nouns:
            nouns.append(noun)
    return nouns


def list_of(g: Words, classes: tuple[str, ...]) -> NounPhrase:
    """Different bare nouns: "eggs, avocadoes, and bread"."""
    return several([bare(noun) for noun in different_nouns(g, classes)])


_PRONOUNS = (
    ("I", "je", 0, "m"),
    ("he", "il", 1, "m"),
    ("she", "elle", 1, "f"),
    ("we", "nous", 2, "m"),
    ("you", "vous", 3, "m"),
    ("they", "ils", 4, "m"),
)


def pronoun(g: Words) -> NounPhrase:
    """I, he, she, we, you, they ("you" is one person, politely: vous)."""
    en, fr, person, gender = g.rng.choice(_PRONOUNS)
    return NounPhrase(mark(en, SUBJECT), fr, person, gender, person in (2, 4), "pronoun")


def person(g: Words) -> NounPhrase:
    """A named, related or otherwise known person, or two of them."""
    draw = g.rng.random()
    if draw < 0.4:
        return name(g)
    if draw < 0.5:
        first, second = name(g), name(g)
        return both(first, second) if first.en != second.en else first
    if draw < 0.75:
        return noun_phrase(g, g.noun("kin"), g.rng.choice(("my", "my", "my", "my+", "owner")))
    return noun_phrase(g, g.noun("role"), g.rng.choice(("the", "the", "the+", "this")))


def subject(g: Words) -> NounPhrase:
    """The subject of a sentence: a pronoun or a person."""
    return pronoun(g) if g.chance(0.5) else person(g)
