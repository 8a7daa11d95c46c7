"""Sentences of one clause: statements, commands, errands, "there is".

Every template returns (English with marks, French before elision), without capital and full stop;
its docstring shows what it makes.
"""

from collections.abc import Callable
from dataclasses import replace

from demo.recipe import french
from demo.recipe import predicates as say
from demo.recipe.circumstances import place, time
from demo.recipe.clauses import (
    Manner,
    Predicate,
    ambiguous,
    clause,
    gerund,
    imperative,
    infinitive,
)
from demo.recipe.english import AUXILIARY, mark
from demo.recipe.lexicon import Noun
from demo.recipe.phrases import (
    COMMA,
    SPACE,
    Bilingual,
    NounPhrase,
    Words,
    concat,
    noun_phrase,
    subject,
)

# Tenses by what a sentence is about; one that is named several times is as much likelier.
_TENSES = {
    "habit": "present " * 9 + "should can like_to would_like_to used_to",
    "past": "past " * 9 + "past_progressive wanted_to",
    "future": "future " * 5
    + "going_to " * 4
    + "must have_to want_to need_to would_like_to can hope_to",
    "present": "progressive " * 3 + "must want_to have_to",
    "none": "present present progressive past past perfect future going_to can must should just "
    "want_to have_to need_to would_like_to used_to prefer_to",
}
_STATE_TENSES = {
    "habit": "present present used_to",
    "past": "past",
    "future": "future future going_to",
    "present": "present",
    "none": "present present past future used_to",
}
_DESCRIBED = (
    "food mass clothes item furniture vehicle building room animal reading topic place device "
    "region"
).split()
_EXISTING = "food mass drink item furniture animal reading role vegetable school device".split()
_ERRAND_TENSES = "past future going_to want_to must have_to should would_like_to need_to".split()
_POSITIONS = (
    ("on", "sur"),
    ("under", "sous"),
    ("behind", "derrière"),
    ("in", "dans"),
    ("next to", "à côté de"),
)
_THERE_IS = (
    ("is", "are", "il y a"),
    ("is", "are", "il y a"),
    ("was", "were", "il y avait"),
    ("will be", "will be", "il y aura"),
)
_PORTABLE = ("food", "mass", "clothes", "item", "reading", "animal")
_NEVER = ("present", "past", "perfect")
_NO_NEGATION = ("used_to", "have_to", "just", "hope_to", "prefer_to")
NO_QUESTION = ("used_to", "just", "hope_to", "prefer_to", "wanted_to", "would_like_to")


def choose_manner(
    g: Words, who: NounPhrase, predicate: Predicate, period: str, negation: float = 0.2
) -> Manner | None:
    """A tense that goes with the period; None if the English would be ambiguous."""
    tense = g.rng.choice((_STATE_TENSES if predicate.state else _TENSES)[period].split())
    negative, adverb = "", ("", "")
    if predicate.negatable and tense not in _NO_NEGATION and g.chance(negation):
        options = ["pas"] * 6
        if period == "none":
            options += ["jamais"] * (tense in _NEVER)
            options += ["plus"] * (tense == "present" and not predicate.fr_tail.startswith("plus "))
        negative = g.rng.choice(options)
    at_will = not predicate.state or predicate.en.base == "be"
    often = period == "none" and tense == "present" and at_will and negative in ("", "pas")
    if often and g.chance(0.3):
        adverbs = g.lexicon.phrases["frequency"]
        adverb = g.rng.choice(adverbs[:2] if negative else adverbs)
    elif tense == "perfect" and not negative and g.chance(0.5):
        adverb = ("already", "déjà")
    manner = Manner(tense, negative, adverb, g.chance(0.7))
    return None if ambiguous(predicate, manner, who) else manner


def choose_period(g: Words) -> str:
    """What a sentence is about: habit, past, future, now, or anything."""
    return g.rng.choices(("habit", "past", "future", "present", "none"), (4, 6, 5, 1, 5))[0]


def simple(
    g: Words,
    who: NounPhrase | None = None,
    period: str = "",
    timed: float = 0.5,
    make: Callable[[Words], Predicate] = say.action,
    negation: float = 0.2,
) -> Bilingual:
    """A clause, perhaps with a time."""
    who = who or subject(g)
    period = period or choose_period(g)
    manner = None
    while manner is None:
        predicate = make(g)
        manner = choose_manner(g, who, predicate, period, negation)
    said = clause(who, predicate, manner)
    if period == "none" or manner.negative in ("jamais", "plus") or not g.chance(timed):
        return said
    when = time(g, period)
    if g.chance(0.25):
        return concat(when, COMMA, said)
    return concat(said, SPACE, when)


def described(g: Words, who: NounPhrase | None = None, period: str = "") -> Bilingual:
    """Paul is tired; the box is on the table; she is ten years old."""
    period = period or g.rng.choice(("none", "none", "past", "future"))
    draw = g.rng.random()
    if who or draw < 0.5:
        who = who or subject(g)
        adjective, job = lambda g: say.being_adjective(g, who), lambda g: say.being_job(g, who)
        makers = (adjective, say.being_somewhere, say.feeling, say.age, job)
        return simple(g, who, period, make=g.rng.choice(makers))
    noun = g.noun(*_DESCRIBED)
    mode = g.rng.choice(("the", "the+", "my", "my+", "this", "owner"))
    thing = noun_phrase(g, noun, mode, modify=0)
    if draw < 0.7 or draw > 0.85 and noun.kind not in _PORTABLE:
        return simple(g, thing, period, make=lambda g: say.being_adjective(g, thing, noun))
    if draw < 0.85:
        return simple(g, thing, "none", make=lambda g: say.comparing(g, thing, noun))
    return simple(g, thing, period, make=_position)


def _position(g: Words) -> Predicate:
    """be on the table, under the bed ..."""
    en, fr = g.rng.choice(_POSITIONS)
    classes = ("item:box", "item:bag", "item:basket", "room") if en == "in" else ("furniture",)
    where = noun_phrase(g, g.noun(*classes), g.rng.choice(("the", "the", "my")), modify=0.1)
    return say.being(f"{en} {where.en}", where.after(fr))


def statement(g: Words) -> Bilingual:
    """A main clause, now and then with a place."""
    if g.chance(0.3):
        return described(g)
    if g.chance(0.12):
        return simple(g, make=say.liking, period="none", negation=0.25)
    if g.chance(0.25):
        return simple(g, make=lambda g: say.intransitive(g).extended(*place(g)))
    return simple(g)


def purpose(g: Words) -> Bilingual:
    """... to buy some bread / before going home / without ..."""
    who = subject(g)
    aim = say.doing(g)
    if g.chance(0.6):
        make, (en, fr) = say.motion, infinitive(aim, who.person)
        link, lien = "to", "pour"
    else:
        make, (en, fr) = say.doing, gerund(aim, who.person)
        link, lien = g.rng.choice((("before", "avant de"), ("without", "sans")))
        if link == "without" and aim.fr_negative:
            link, lien = "before", "avant de"
    main = simple(g, who, timed=0, make=make, negation=0.1)
    return concat(main, (f" {link} {en}", f" {lien} {fr}"))


def commands(g: Words) -> Bilingual:
    """Close the door / let's go to the market and buy ... / don't open the window."""
    who = g.rng.choice((2, 3))
    if g.chance(0.2):
        command = imperative(_to_command(g, negatable=True), who, negative=True)
    else:
        command = imperative(_to_command(g), who)
        if g.chance(0.45):
            command = _and_another(command, imperative(_to_command(g), who))
    if who == 3 and g.chance(0.4):
        if g.chance(0.5):
            return concat(("please ", ""), command, ("", ", s'il vous plaît"))
        return concat(command, (", please", ", s'il vous plaît"))
    if g.chance(0.3):
        return concat(command, SPACE, time(g, "future"))
    return command


def _and_another(first: Bilingual, second: Bilingual) -> Bilingual:
    """Two commands as one: "let's" is said once."""
    return concat(first, (" and ", " et "), (second[0].removeprefix("let's "), second[1]))


def _to_command(g: Words, negatable: bool = False) -> Predicate:
    """Something one may ask for: nobody asks for too many apples."""
    while True:
        predicate = say.doing(g)
        if "too many" not in predicate.en_tail and (predicate.negatable or not negatable):
            return predicate


def errand(g: Words) -> Bilingual:
    """Let's go to the store and buy some groceries including eggs, avocadoes, and bread."""
    category = g.rng.choice(g.lexicon.nouns["category"])
    go = say.from_action(g.lexicon.actions["motion"][0], *_to_shop(g, category))
    buy = say.shopping(g, category)
    draw = g.rng.random()
    if draw < 0.4:
        who = g.rng.choice((2, 2, 3))
        return _and_another(imperative(go, who), imperative(buy, who))
    who = subject(g)
    tense = g.rng.choice(_ERRAND_TENSES)
    if draw < 0.6:
        return clause(who, buy, Manner(tense))
    if draw < 0.8:
        return concat(
            clause(who, go, Manner(tense)), (" to ", " pour "), infinitive(buy, who.person)
        )
    manner = Manner(g.rng.choice(("past", "future")))
    en, fr = clause(who.silent(), buy, manner)
    return concat(clause(who, go, manner), (" and ", " et "), (en.removeprefix("will "), fr))


_SHOPS = {
    "clothes": ("store",),
    "school supplies": ("store", "bookstore", "supermarket"),
    "tools": ("store",),
    "furniture": ("store",),
    "gifts": ("store", "market"),
    "household goods": ("store", "supermarket"),
}


def _to_shop(g: Words, category: Noun) -> Bilingual:
    shop = g.rng.choice(_SHOPS.get(category.en, ("store", "market", "supermarket", "farm")))
    where = noun_phrase(g, g.noun(f"place:{shop}"), "the", modify=0.05)
    return f"to {where.en}", french.with_a(where.fr)


def existence(g: Words) -> Bilingual:
    """There are some apples in the basket."""
    noun = g.noun(*_EXISTING)
    modes = ("some", "lot") if noun.mass else ("a", "some+", "number+", "several+", "many+")
    thing = noun_phrase(g, noun, g.rng.choice(modes))
    one, many, fr = g.rng.choice(_THERE_IS)
    be = many if thing.plural else one
    where = _inside(g) if noun.kind in _PORTABLE and g.chance(0.6) else place(g)
    if thing.fr_negative and g.chance(0.3):
        be = "won't be" if be == "will be" else mark(be + "n't", AUXILIARY)
        fr = fr.replace("il y", "il n'y") + " pas"
        thing = replace(thing, en=thing.en_negative, fr=thing.fr_negative)
    elif be != "will be":
        be = mark(be, AUXILIARY)
    return f"there {be} {thing.en} {where[0]}", f"{fr} {thing.fr} {where[1]}"


def _inside(g: Words) -> Bilingual:
    predicate = _position(g)
    return predicate.en_tail, predicate.fr_tail
