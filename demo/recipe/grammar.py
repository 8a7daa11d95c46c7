"""The synchronous grammar: draws (English, French) sentence pairs.

`sample(rng)` is the entry point; equal sources of randomness give equal sentences. The English
determines the French: no English sentence of this grammar has two translations ("you" is always
the polite "vous", "they" is "ils", adjectives and participles after I, you, we and they are
masculine).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from demo.recipe import french
from demo.recipe import predicates as say
from demo.recipe.circumstances import place, weather, weather_report
from demo.recipe.clauses import Manner, Predicate, ambiguous, clause, english_clause, french_clause
from demo.recipe.english import COUNTED, mark, number, parse_verb, plain
from demo.recipe.phrases import (
    COMMA,
    SPACE,
    Bilingual,
    NounPhrase,
    Words,
    both,
    concat,
    different_nouns,
    list_of,
    name,
    noun_phrase,
    person,
    pronoun,
    several,
    subject,
)
from demo.recipe.questions import asking
from demo.recipe.templates import (
    commands,
    described,
    errand,
    existence,
    purpose,
    simple,
    statement,
)

MIN_WORDS, MAX_WORDS = 5, 40
_OWNED = "animal:dog animal:cat item vehicle:car furniture reading building:house".split()
_WISHED = "vehicle:car vehicle:boat item animal:horse animal:dog tool device school".split()
_BOUGHT_TOGETHER = (
    ("food", "mass", "vegetable", "drink"),
    ("clothes",),
    ("item", "school"),
    ("food", "vegetable"),
)
_DOUBLED = re.compile(r"\b(\w+) \1\b")  # "that that": correct, but it looks like an error


@dataclass(frozen=True)
class Pair:
    """An English sentence with the marks of english.py, and its translation."""

    marked: str
    fr: str

    @property
    def en(self) -> str:
        """The English sentence."""
        return plain(self.marked)


def price(g: Words) -> Bilingual:
    """The red shirt costs twelve euros."""
    noun = g.noun("clothes", "item", "furniture", "device", "reading:book", "vehicle", "tool")
    thing = noun_phrase(g, noun, g.rng.choice(("the", "the+", "this", "this+")), modify=0.5)
    amount = g.rng.choice((g.rng.randint(2, 99), g.rng.randint(100, 999)))
    predicate = Predicate(
        parse_verb("cost/cost"),
        french.conjugate("coûter"),
        f"{number(amount)} {mark('euros', COUNTED)}",
        f"{french.number(amount)} euros",
        state=True,
    )
    tense = g.rng.choice(("present", "future")) if not thing.plural else "future"
    return clause(thing, predicate, Manner(tense))


def possession(g: Words) -> Bilingual:
    """My brother has two cats and a dog."""
    have = g.verb("have")
    nouns = [g.noun(*_OWNED) for _ in range(2)]
    modes = ("a", "number+", "several+")
    first, second = (noun_phrase(g, n, g.rng.choice(modes), modify=0.3) for n in nouns)
    thing = first if nouns[0] == nouns[1] else replace(both(first, second), negatable=False)
    period = g.rng.choice(("none", "none", "future", "past"))
    return simple(g, None, period, 0, lambda g: say.with_object(have, thing), negation=0)


def because(g: Words) -> Bilingual:
    """... because ..."""
    period = g.rng.choice(("past", "future", "none"))
    first = simple(g, period=period, timed=0.3)
    makers = (
        lambda: described(g, subject(g), period),
        lambda: simple(g, period=period, timed=0),
        lambda: weather(g, "present" if period == "none" else period),
    )
    return concat(first, (" because ", " parce que "), g.rng.choice(makers)())


def contrast(g: Words) -> Bilingual:
    """..., but ..."""
    link = g.rng.choice(((", but ", ", mais "), (", and ", ", et "), (", so ", ", donc ")))
    return concat(_part(g), link, _part(g))


def _part(g: Words) -> Bilingual:
    """One half of a compound sentence: short, or with a clause of its own."""
    long = (because, when_future, opinion, who_relative, that_relative, existence, purpose)
    return g.rng.choices((simple, described, *long), (8, 4, *[1] * len(long)))[0](g)


def _unambiguous(
    g: Words, who: NounPhrase, manner: Manner, make: Callable[[Words], Predicate] = say.doing
) -> Predicate:
    """Something to do whose tense the English form shows."""
    while ambiguous(predicate := make(g), manner, who):
        pass
    return predicate


def _plain_action(g: Words, who: NounPhrase, manner: Manner) -> Bilingual:
    return clause(who, _unambiguous(g, who, manner), manner)


def when_future(g: Words) -> Bilingual:
    """When Anna arrives, we will eat: English present, French future."""
    who, manner = subject(g), Manner("when_future")
    predicate = _unambiguous(g, who, manner)
    first = english_clause(who, predicate, Manner("present")), french_clause(who, predicate, manner)
    second = _plain_action(g, subject(g), Manner("future"))
    if g.chance(0.5):
        return concat(("when ", "quand "), first, COMMA, second)
    return concat(second, (" when ", " quand "), first)


def if_real(g: Words) -> Bilingual:
    """If it rains tomorrow, we will stay at home."""
    if g.chance(0.4):
        first = concat(weather(g, "if"), SPACE, g.phrase("time future"))
    else:
        who, manner = subject(g), Manner("present", "pas" if g.chance(0.2) else "")
        first = clause(who, _unambiguous(g, who, manner, _negatable), manner)
    second = _plain_action(g, subject(g), Manner("future"))
    if g.chance(0.6):
        return concat(("if ", "si "), first, COMMA, second)
    return concat(second, (" if ", " si "), first)


def _negatable(g: Words) -> Predicate:
    while not (predicate := say.doing(g)).negatable:
        pass
    return predicate


def if_unreal(g: Words) -> Bilingual:
    """If Paul had a car, he would drive to the market."""
    have = g.verb("have")
    who = subject(g)
    if g.chance(0.6):
        thing = noun_phrase(g, g.noun(*_WISHED), "a", modify=0.4)
        manner = Manner("if_past", "pas" if g.chance(0.2) else "")
        first = clause(who, say.with_object(have, thing), manner)
    else:
        first = _plain_action(g, who, Manner("if_past"))
    second = _plain_action(g, subject(g), Manner("conditional"))
    return concat(("if ", "si "), first, COMMA, second)


def meanwhile(g: Words) -> Bilingual:
    """Anna was cooking when Paul arrived; while Anna was cooking, Paul was sleeping."""
    first = _plain_action(g, subject(g), Manner("past_progressive"))
    if g.chance(0.5):
        second = _plain_action(g, subject(g), Manner("past"))
        return concat(first, (" when ", " quand "), second)
    second = _plain_action(g, subject(g), Manner("past_progressive"))
    return concat(("while ", "pendant que "), first, COMMA, second)


def opinion(g: Words) -> Bilingual:
    """My mother thinks that ..., Paul says that ..."""
    en, fr = (text.rpartition(" ") for text in g.phrase("opinion"))
    verb = Predicate(parse_verb(en[0]), french.conjugate(fr[0]), "that", "que")
    first = clause(subject(g), verb, Manner("present"))
    return concat(first, SPACE, g.rng.choice((simple, described, existence))(g))


def who_relative(g: Words) -> Bilingual:
    """The man who sells bread is tired."""
    noun = g.noun("role")
    who = noun_phrase(g, noun, g.rng.choice(("the", "the", "the+")), modify=0.15)
    manner = Manner(g.rng.choice(("present", "past", "progressive")))
    inner = _plain_action(g, who.silent(), manner)
    head = replace(who, en=f"{who.en} who {inner[0]}", fr=f"{who.fr} qui {inner[1]}")
    if g.chance(0.5):
        return described(g, head, "none")
    return simple(g, head, timed=0.3)


def that_relative(g: Words) -> Bilingual:
    """The car that Anna bought is red: the participle agrees with what precedes."""
    action = g.rng.choice([a for a in g.lexicon.plain_transitives if not a.state])
    classes = [c for c in action.objects if c not in ("person", "region", "place")]
    if not classes:
        return that_relative(g)
    noun = g.noun(g.rng.choice(classes))
    thing = noun_phrase(g, noun, g.rng.choice(("the", "the+")), modify=0.2)
    inner = Predicate(action.en, action.fr, agreement=(thing.gender, thing.plural))
    agent = subject(g)
    en, fr = clause(agent, inner, Manner(g.rng.choice(("past", "past", "perfect", "going_to"))))
    head = replace(thing, en=f"{thing.en} that {en}", fr=f"{thing.fr} que {fr}")
    draw = g.rng.random()
    if draw < 0.5:
        period = g.rng.choice(("none", "past", "future"))
        return simple(g, head, period, 0, lambda g: say.being_adjective(g, head, noun))
    if draw < 0.7:
        return simple(g, head, "none", timed=0, make=say.being_somewhere)
    finder = g.verb(g.rng.choice(("find", "look")))
    return simple(g, make=lambda g: say.with_object(finder, head), timed=0.2, negation=0.1)


def shopping_list(g: Words) -> Bilingual:
    """We bought three apples, a cake, and some bread at the market."""
    classes = g.rng.choice(_BOUGHT_TOGETHER)
    buy = g.verb(g.rng.choice(("buy", "sell", "buy")))
    items = list_of(g, classes) if g.chance(0.4) else _determined(g, classes)
    purchase = say.with_object(buy, items)
    if g.chance(0.5):
        purchase = purchase.extended(*place(g))
    elif g.chance(0.4):
        friend = person(g)
        purchase = purchase.extended(f"for {friend.en}", f"pour {friend.fr}")
    return simple(g, make=lambda g: purchase, timed=0.3, negation=0)


def _determined(g: Words, classes: tuple[str, ...]) -> NounPhrase:
    """A list whose members have determiners: "three apples, a cake, and some bread"."""
    modes = ("a", "some+", "number+", "several+")
    return several(
        [
            noun_phrase(g, noun, "some" if noun.mass else g.rng.choice(modes), modify=0.2)
            for noun in different_nouns(g, classes)
        ]
    )


def liking_to(g: Words) -> Bilingual:
    """Marie likes to swim, but she hates ..."""
    who = name(g) if g.chance(0.6) else pronoun(g)
    tense = g.rng.choice(("like_to", "prefer_to", "want_to", "would_like_to"))
    first = clause(who, say.doing(g), Manner(tense))
    if g.chance(0.5):
        return first
    if who.kind == "name":
        en, fr = ("she", "elle") if who.gender == "f" else ("he", "il")
        who = replace(who, en=en, fr=fr)
    return concat(first, (", but ", ", mais "), clause(who, say.liking(g), Manner("present")))


_TEMPLATES = (
    (statement, 24),
    (asking, 13),
    (commands, 9),
    (errand, 9),
    (existence, 5),
    (purpose, 6),
    (weather_report, 3),
    (price, 2),
    (possession, 3),
    (because, 5),
    (contrast, 8),
    (when_future, 3),
    (if_real, 3),
    (if_unreal, 2),
    (meanwhile, 3),
    (opinion, 4),
    (who_relative, 4),
    (that_relative, 4),
    (shopping_list, 5),
    (liking_to, 3),
)


def finish(en: str, fr: str) -> Pair:
    """Elision, capitals and full stops."""
    fr = french.elide(fr)
    fr = fr[0].upper() + fr[1:]
    en = en[0].upper() + en[1:]
    if not plain(en).endswith("?"):
        en, fr = en + ".", fr + "."
    return Pair(en, fr)


def sample(rng: random.Random) -> Pair:
    """One sentence of 5 to 40 words in both languages."""
    g = Words(rng)
    makers, weights = zip(*_TEMPLATES, strict=True)
    while True:
        pair = finish(*rng.choices(makers, weights)[0](g))
        lengths = [len(text.rstrip(" ?").split()) for text in (pair.en, pair.fr)]
        if MIN_WORDS <= min(lengths) and max(lengths) <= MAX_WORDS:
            if not _DOUBLED.search(pair.en):
                return pair
