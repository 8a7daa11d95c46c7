"""Sentences of one clause: statements, commands, errands, questions, "there is".

Every template returns (English with marks, French before elision), without capital and full stop.
"""

from collections.abc import Callable

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
from demo.recipe.english import AUXILIARY, mark, plain
from demo.recipe.lexicon import Noun
from demo.recipe.phrases import (
    NounPhrase,
    Words,
    noun_phrase,
    subject,
)

Bilingual = tuple[str, str]

_TENSES = {
    "habit": ("present",) * 9 + ("should", "can", "like_to", "would_like_to", "used_to"),
    "past": ("past",) * 9 + ("past_progressive", "wanted_to"),
    "future": ("future",) * 5
    + ("going_to",) * 4
    + ("must", "have_to", "want_to", "need_to", "would_like_to", "can", "hope_to"),
    "present": ("progressive",) * 3 + ("must", "want_to", "have_to"),
    "none": (
        "present",
        "present",
        "progressive",
        "past",
        "past",
        "perfect",
        "future",
        "going_to",
        "can",
        "must",
        "should",
        "just",
        "want_to",
        "have_to",
        "need_to",
        "would_like_to",
        "used_to",
        "prefer_to",
    ),
}
_STATE_TENSES = {
    "habit": ("present", "present", "used_to"),
    "past": ("past",),
    "future": ("future", "future", "going_to"),
    "present": ("present",),
    "none": ("present", "present", "past", "future", "used_to"),
}
_PORTABLE = ("food", "mass", "clothes", "item", "reading", "animal")
_NEVER = ("present", "past", "perfect")
_NO_NEGATION = ("used_to", "have_to", "just", "hope_to", "prefer_to")
NO_QUESTION = ("used_to", "just", "hope_to", "prefer_to", "wanted_to", "would_like_to")


def choose_manner(
    g: Words, who: NounPhrase, predicate: Predicate, period: str, negation: float = 0.2
) -> Manner | None:
    """A tense that goes with the period; None if the English would be ambiguous."""
    tense = g.rng.choice((_STATE_TENSES if predicate.state else _TENSES)[period])
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
        adverb = (
            g.phrase("frequency")
            if not negative
            else g.rng.choice(g.lexicon.phrases["frequency"][:2])
        )
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
    """A clause, perhaps with place or time, no punctuation."""
    who = who or subject(g)
    period = period or choose_period(g)
    while True:
        predicate = make(g)
        manner = choose_manner(g, who, predicate, period, negation)
        if manner:
            break
    en, fr = clause(who, predicate, manner)
    if period in ("none",) or manner.negative in ("jamais", "plus") or not g.chance(timed):
        return en, fr
    time_en, time_fr = time(g, period)
    if g.chance(0.25):
        return f"{time_en}, {en}", f"{time_fr}, {fr}"
    return f"{en} {time_en}", f"{fr} {time_fr}"


def described(g: Words, who: NounPhrase | None = None, period: str = "") -> Bilingual:
    """Somebody or something is somehow, somewhere, some age."""
    period = period or g.rng.choice(("none", "none", "past", "future"))
    draw = g.rng.random()
    if who or draw < 0.5:
        who = who or subject(g)
        make = g.rng.choice(
            (
                lambda g: say.being_adjective(g, who),
                say.being_somewhere,
                say.feeling,
                say.age,
                lambda g: say.being_job(g, who),
            )
        )
        return simple(g, who, period, make=make)
    noun = g.noun(
        "food",
        "mass",
        "clothes",
        "item",
        "furniture",
        "vehicle",
        "building",
        "room",
        "animal",
        "reading",
        "topic",
        "place",
        "device",
        "region",
    )
    thing = noun_phrase(
        g, noun, g.rng.choice(("the", "the+", "my", "my+", "this", "owner")), modify=0
    )
    if draw < 0.7 or draw > 0.85 and noun.kind not in _PORTABLE:
        return simple(g, thing, period, make=lambda g: say.being_adjective(g, thing, noun))
    if draw < 0.85:
        return simple(g, thing, "none", make=lambda g: say.comparing(g, thing, noun))
    return simple(g, thing, period, make=_position)


def _position(g: Words) -> Predicate:
    """be on the table, under the bed ..."""
    en, fr = g.rng.choice(
        (("on", "sur"), ("under", "sous"), ("behind", "derrière"), ("in", "dans"), ("next to", ""))
    )
    noun = (
        g.noun("item:box", "item:bag", "item:basket", "room") if en == "in" else g.noun("furniture")
    )
    where = noun_phrase(g, noun, g.rng.choice(("the", "the", "my")), modify=0.1)
    return say.being(f"{en} {where.en}", f"{fr} {where.fr}" if fr else f"à côté {where.with_de()}")


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
    return f"{main[0]} {link} {en}", f"{main[1]} {lien} {fr}"


def commands(g: Words) -> Bilingual:
    """Close the door / let's go to the market and buy ... / don't open the window."""
    who = g.rng.choice((2, 3))
    if g.chance(0.2):
        en, fr = imperative(_to_command(g, negatable=True), who, negative=True)
    else:
        en, fr = imperative(_to_command(g), who)
        if g.chance(0.45):
            more = imperative(_to_command(g), who)
            en, fr = f"{en} and {more[0].removeprefix(lets(who))}", f"{fr} et {more[1]}"
    if who == 3 and g.chance(0.4):
        if g.chance(0.5):
            return f"please {en}", f"{fr}, s'il vous plaît"
        return f"{en}, please", f"{fr}, s'il vous plaît"
    if g.chance(0.3):
        en_time, fr_time = time(g, "future")
        return f"{en} {en_time}", f"{fr} {fr_time}"
    return en, fr


def lets(who: int) -> str:
    """What begins a proposal."""
    return "let's " if who == 2 else ""


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
        first, second = imperative(go, who), imperative(buy, who)
        return (f"{first[0]} and {second[0].removeprefix(lets(who))}", f"{first[1]} et {second[1]}")
    who = subject(g)
    tense = g.rng.choice(
        (
            "past",
            "future",
            "going_to",
            "want_to",
            "must",
            "have_to",
            "should",
            "would_like_to",
            "need_to",
        )
    )
    if draw < 0.6:
        return clause(who, buy, Manner(tense))
    if draw < 0.8:
        en, fr = clause(who, go, Manner(tense))
        more = infinitive(buy, who.person)
        return f"{en} to {more[0]}", f"{fr} pour {more[1]}"
    tense = g.rng.choice(("past", "future"))
    first, second = clause(who, go, Manner(tense)), clause(_silent(who), buy, Manner(tense))
    second_en = second[0].removeprefix("will ")
    return f"{first[0]} and {second_en}", f"{first[1]} et {second[1]}"


def _silent(who: NounPhrase) -> NounPhrase:
    """The same subject, left out."""
    return NounPhrase("", "", who.person, who.gender, who.plural, who.kind)


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
    noun = g.noun(
        "food",
        "mass",
        "drink",
        "item",
        "furniture",
        "animal",
        "reading",
        "role",
        "vegetable",
        "school",
        "device",
    )
    modes = ("some", "lot") if noun.mass else ("a", "some+", "number+", "several+", "many+")
    thing = noun_phrase(g, noun, g.rng.choice(modes))
    fr_form, past, future = g.rng.choice(
        (
            ("il y a", False, False),
            ("il y a", False, False),
            ("il y avait", True, False),
            ("il y aura", False, True),
        )
    )
    be = (
        "will be"
        if future
        else mark(
            ("were" if past else "are") if thing.plural else ("was" if past else "is"), AUXILIARY
        )
    )
    where = _inside(g) if noun.kind in _PORTABLE and g.chance(0.6) else place(g)
    if thing.fr_negative and g.chance(0.3):
        negated = "won't be" if future else plain(be) + "n't" + be[len(plain(be)) :]
        fr = fr_form.replace("il y", "il n'y") + " pas"
        return (
            f"there {negated} {thing.en_negative} {where[0]}",
            f"{fr} {thing.fr_negative} {where[1]}",
        )
    return f"there {be} {thing.en} {where[0]}", f"{fr_form} {thing.fr} {where[1]}"


def _inside(g: Words) -> Bilingual:
    predicate = _position(g)
    return predicate.en_tail, predicate.fr_tail
