"""The synchronous grammar: draws (English, French) sentence pairs, deterministic by its source.

`sample(rng)` is the one entry. What is said in English determines its French: no English sentence
of this grammar has two translations ("you" is always the polite "vous", "they" is "ils", adjectives
and participles after I, you, we and they are masculine).
"""

import random
import re
from dataclasses import dataclass, replace

from demo.recipe import french
from demo.recipe import predicates as say
from demo.recipe.circumstances import place, time
from demo.recipe.clauses import Manner, Predicate, ambiguous, clause, english_clause, french_clause
from demo.recipe.english import COUNTED, mark, number, parse_verb, plain
from demo.recipe.phrases import (
    NounPhrase,
    Words,
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
    Bilingual,
    commands,
    described,
    errand,
    existence,
    purpose,
    simple,
    statement,
)

MIN_WORDS, MAX_WORDS = 5, 40
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


def weather(g: Words, period: str = "") -> Bilingual:
    """It is raining; it will be cold; it was sunny."""
    period = period or g.rng.choice(("present", "past", "future", "was", "going"))
    if g.chance(0.5):
        verb, forms = g.phrase("weather verb")
        present, past, imperfect, future, base = forms.split(", ")
        english = parse_verb(verb)
        return {
            "present": (f"it is {english.gerund}", f"il {present}"),
            "past": (f"it {english.past}", f"il {past}"),
            "was": (f"it was {english.gerund}", f"il {imperfect}"),
            "future": (f"it will {verb}", f"il {future}"),
            "if": (f"it {english.third}", f"il {present}"),
            "going": (f"it is going to {verb}", f"il va {base}"),
        }[period]
    en, fr = g.phrase("weather state")
    there = fr.startswith("du ")  # "il y a du vent", but "il fait froid"
    verb = french.conjugate("avoir" if there else "faire")
    lead = "il y" if there else "il"
    infinitive = "il va y avoir" if there else "il va faire"
    return {
        "present": (f"it is {en}", f"{lead} {verb.present[1]} {fr}"),
        "past": (f"it was {en}", f"{lead} {verb.imperfect[1]} {fr}"),
        "was": (f"it was {en}", f"{lead} {verb.imperfect[1]} {fr}"),
        "future": (f"it will be {en}", f"{lead} {verb.future[1]} {fr}"),
        "if": (f"it is {en}", f"{lead} {verb.present[1]} {fr}"),
        "going": (f"it is going to be {en}", f"{infinitive} {fr}"),
    }[period]


def weather_report(g: Words) -> Bilingual:
    """It will be cold tomorrow in Paris."""
    period = g.rng.choice(("present", "past", "future", "was", "going"))
    en, fr = weather(g, period)
    when = time(g, {"was": "past", "going": "future", "present": "present"}.get(period, period))
    if g.chance(0.5):
        where = g.phrase("city")
        en, fr = f"{en} in {where[0]}", f"{fr} à {where[1]}"
    return f"{en} {when[0]}", f"{fr} {when[1]}"


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
    nouns = [
        g.noun(
            "animal:dog",
            "animal:cat",
            "item",
            "vehicle:car",
            "furniture",
            "reading",
            "building:house",
        )
        for _ in range(2)
    ]
    modes = ("a", "number+", "several+")
    first, second = (noun_phrase(g, n, g.rng.choice(modes), modify=0.3) for n in nouns)
    thing = (
        first
        if nouns[0] == nouns[1]
        else NounPhrase(
            f"{first.en} and {second.en}", f"{first.fr} et {second.fr}", 4, negatable=False
        )
    )
    return simple(
        g,
        make=lambda g: say.with_object(have, thing),
        timed=0,
        negation=0,
        period=g.rng.choice(("none", "none", "future", "past")),
    )


def because(g: Words) -> Bilingual:
    """... because ..."""
    period = g.rng.choice(("past", "future", "none"))
    first = simple(g, period=period, timed=0.3)
    reason = g.rng.choice(
        (
            lambda: described(g, subject(g), period),
            lambda: simple(g, period=period, timed=0),
            lambda: weather(g, {"none": "present"}.get(period, period)),
        )
    )()
    return f"{first[0]} because {reason[0]}", f"{first[1]} parce que {reason[1]}"


def contrast(g: Words) -> Bilingual:
    """..., but ..."""
    en, fr = g.rng.choice((("but", "mais"), ("and", "et"), ("so", "donc")))
    first, second = _part(g), _part(g)
    return f"{first[0]}, {en} {second[0]}", f"{first[1]}, {fr} {second[1]}"


def _part(g: Words) -> Bilingual:
    """One half of a compound sentence: short, or with a clause of its own."""
    makers = (
        simple,
        described,
        because,
        when_future,
        opinion,
        who_relative,
        that_relative,
        existence,
        purpose,
    )
    return g.rng.choices(makers, (8, 4, 1, 1, 1, 1, 1, 1, 1))[0](g)


def _plain_action(g: Words, who: NounPhrase, manner: Manner, make=say.doing) -> Bilingual:
    while ambiguous(predicate := make(g), manner, who):
        pass
    return clause(who, predicate, manner)


def when_future(g: Words) -> Bilingual:
    """When Anna arrives, we will eat: the future in French."""
    who = subject(g)
    first = _when_clause(g, who)
    second = _plain_action(g, subject(g), Manner("future"))
    if g.chance(0.5):
        return f"when {first[0]}, {second[0]}", f"quand {first[1]}, {second[1]}"
    return f"{second[0]} when {first[0]}", f"{second[1]} quand {first[1]}"


def _when_clause(g: Words, who: NounPhrase) -> Bilingual:
    """English present, French future."""
    while True:
        predicate = say.doing(g)
        if not ambiguous(predicate, Manner("when_future"), who):
            return (
                english_clause(who, predicate, Manner("present")),
                french_clause(who, predicate, Manner("when_future")),
            )


def if_real(g: Words) -> Bilingual:
    """If it rains tomorrow, we will stay at home."""
    if g.chance(0.4):
        first, when = weather(g, "if"), g.phrase("time future")
        first = f"{first[0]} {when[0]}", f"{first[1]} {when[1]}"
    else:
        first = _plain_action(
            g, subject(g), Manner("present", "pas" if g.chance(0.2) else ""), _positive_or_negatable
        )
    second = _plain_action(g, subject(g), Manner("future"))
    if g.chance(0.6):
        return f"if {first[0]}, {second[0]}", f"si {first[1]}, {second[1]}"
    return f"{second[0]} if {first[0]}", f"{second[1]} si {first[1]}"


def _positive_or_negatable(g: Words) -> Predicate:
    while not (predicate := say.doing(g)).negatable:
        pass
    return predicate


def if_unreal(g: Words) -> Bilingual:
    """If Paul had a car, he would drive to the market."""
    have = g.verb("have")
    who = subject(g)
    if g.chance(0.6):
        noun = g.noun(
            "vehicle:car",
            "vehicle:boat",
            "item",
            "animal:horse",
            "animal:dog",
            "tool",
            "device",
            "school",
        )
        thing = noun_phrase(g, noun, "a", modify=0.4)
        first = clause(
            who, say.with_object(have, thing), Manner("if_past", "pas" if g.chance(0.2) else "")
        )
    else:
        first = _plain_action(g, who, Manner("if_past"))
    other = subject(g)
    second = _plain_action(g, other, Manner("conditional"))
    return f"if {first[0]}, {second[0]}", f"si {first[1]}, {second[1]}"


def meanwhile(g: Words) -> Bilingual:
    """Anna was cooking when Paul arrived; while ... was ..., ... was ..."""
    first = _plain_action(g, subject(g), Manner("past_progressive"))
    if g.chance(0.5):
        second = _plain_action(g, subject(g), Manner("past"))
        return f"{first[0]} when {second[0]}", f"{first[1]} quand {second[1]}"
    second = _plain_action(g, subject(g), Manner("past_progressive"))
    return f"while {first[0]}, {second[0]}", f"pendant que {first[1]}, {second[1]}"


def opinion(g: Words) -> Bilingual:
    """My mother thinks that ..., Paul said that ..."""
    en, fr = g.phrase("opinion")
    who = subject(g)
    verb = Predicate(
        parse_verb(en.removesuffix(" that")),
        french.conjugate(fr.removesuffix(" que")),
        "that",
        "que",
    )
    first = clause(who, verb, Manner("present"))
    inner = g.rng.choice((lambda: simple(g), lambda: described(g), lambda: existence(g)))()
    return f"{first[0]} {inner[0]}", f"{first[1]} {inner[1]}"


def who_relative(g: Words) -> Bilingual:
    """The man who sells bread is tired."""
    noun = g.noun("role")
    who = noun_phrase(g, noun, g.rng.choice(("the", "the", "the+")), modify=0.15)
    silent = NounPhrase("", "", who.person, who.gender, who.plural, who.kind)
    inner = _plain_action(g, silent, Manner(g.rng.choice(("present", "past", "progressive"))))
    head = replace(who, en=f"{who.en} who {inner[0]}", fr=f"{who.fr} qui {inner[1]}")
    if g.chance(0.5):
        return described(g, head, "none")
    return simple(g, head, timed=0.3)


def that_relative(g: Words) -> Bilingual:
    """The car that Anna bought is red: the participle agrees with what precedes."""
    action = g.rng.choice(
        [
            a
            for a in g.lexicon.actions["transitive"]
            if not a.fr_rest and a.en.base != a.en.past and not a.state
        ]
    )
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
        return simple(
            g,
            head,
            g.rng.choice(("none", "past", "future")),
            timed=0,
            make=lambda g: say.being_adjective(g, head, noun),
        )
    if draw < 0.7:
        return simple(g, head, "none", timed=0, make=say.being_somewhere)
    finder = g.verb(g.rng.choice(("find", "look")))
    return simple(g, make=lambda g: say.with_object(finder, head), timed=0.2, negation=0.1)


def shopping_list(g: Words) -> Bilingual:
    """We bought three apples, a cake, and some bread at the market."""
    kinds = g.rng.choice(
        (
            ("food", "mass", "vegetable", "drink"),
            ("clothes",),
            ("item", "school"),
            ("food", "vegetable"),
        )
    )
    buy = g.verb(g.rng.choice(("buy", "sell", "buy")))
    if g.chance(0.4):
        items = list_of(g, kinds)
    else:
        items = _determined(g, kinds)
    make = say.with_object(buy, items)
    if g.chance(0.5):
        where = place(g)
        make = make.extended(*where)
    elif g.chance(0.4):
        friend = person(g)
        make = make.extended(f"for {friend.en}", f"pour {friend.fr}")
    return simple(g, make=lambda g: make, timed=0.3, negation=0)


def _determined(g: Words, kinds: tuple[str, ...]) -> NounPhrase:
    nouns = []
    size = g.rng.randint(2, 4)
    while len(nouns) < size:
        noun = g.noun(*kinds)
        if noun not in nouns:
            nouns.append(noun)
    modes = ("a", "some+", "number+", "several+")
    return several(
        [noun_phrase(g, n, "some" if n.mass else g.rng.choice(modes), modify=0.2) for n in nouns]
    )


def liking_to(g: Words) -> Bilingual:
    """Marie likes to swim, but she hates ..."""
    who = name(g) if g.chance(0.6) else pronoun(g)
    tense = g.rng.choice(("like_to", "prefer_to", "want_to", "would_like_to"))
    first = clause(who, say.doing(g), Manner(tense))
    if g.chance(0.5):
        return first
    again = {"f": ("she", "elle"), "m": ("he", "il")}[who.gender]
    second_who = replace(who, en=again[0], fr=again[1]) if who.kind == "name" else who
    second = clause(second_who, say.liking(g), Manner("present"))
    return f"{first[0]}, but {second[0]}", f"{first[1]}, mais {second[1]}"


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
        make = rng.choices(makers, weights)[0]
        pair = finish(*make(g))
        if all(
            MIN_WORDS <= len(text.rstrip(" ?").split()) <= MAX_WORDS for text in (pair.en, pair.fr)
        ) and not _DOUBLED.search(pair.en):
            return pair
