"""Questions, with "est-ce que" in French: yes or no, where, when, why, how, what, who, how many."""

from demo.recipe import french
from demo.recipe import predicates as say
from demo.recipe.circumstances import time
from demo.recipe.clauses import Manner, Predicate, question
from demo.recipe.english import AUXILIARY, COUNTED, mark
from demo.recipe.lexicon import Noun
from demo.recipe.phrases import NounPhrase, Words, noun_phrase, subject
from demo.recipe.templates import NO_QUESTION, Bilingual, choose_manner, choose_period, simple

_WH = (("where", "où"), ("when", "quand"), ("why", "pourquoi"), ("how", "comment"))


def asking(g: Words) -> Bilingual:
    """Does ... ? Why ... ? How many ... ? Where is ... ? Who ... ?"""
    make = g.rng.choices((_yes_no, _wh, _how_many, _what, _who, _where_is), (6, 5, 2, 2, 2, 1))[0]
    en, fr = make(g)
    return en + "?", fr + " ?"


def _question_manner(g: Words, who: NounPhrase, predicate: Predicate, period: str) -> Manner:
    while True:
        manner = choose_manner(g, who, predicate, period, negation=0)
        if manner and manner.tense not in NO_QUESTION and not manner.adverb[0]:
            return manner


def _asker(g: Words) -> tuple[NounPhrase, Predicate]:
    """No "I": one seldom asks about oneself; nothing ambiguous under "did"."""
    while True:
        who, predicate = subject(g), say.action(g)
        if who.person != 0 and predicate.en.base != predicate.en.past:
            return who, predicate


def _yes_no(g: Words) -> Bilingual:
    if g.chance(0.25):
        who = subject(g)
        predicate = g.rng.choice(
            (say.being_somewhere, say.feeling, lambda g: say.being_adjective(g, who))
        )(g)
    else:
        who, predicate = _asker(g)
    period = choose_period(g)
    en, fr = question(who, predicate, _question_manner(g, who, predicate, period))
    if period == "none" or g.chance(0.5):
        return en, fr
    when = time(g, period)
    return f"{en} {when[0]}", f"{fr} {when[1]}"


def _wh(g: Words) -> Bilingual:
    who, predicate = _asker(g)
    word = g.rng.choice(_WH)
    period = g.rng.choice(("past", "future", "none"))
    return question(who, predicate, _question_manner(g, who, predicate, period), word)


def _object_question(g: Words) -> tuple[NounPhrase, Predicate]:
    action = g.rng.choice(
        [
            a
            for a in g.lexicon.actions["transitive"]
            if not a.fr_rest and not a.en.rest and a.en.base != a.en.past
        ]
    )
    return subject(g), say.from_action(action)


def _how_many(g: Words) -> Bilingual:
    who = subject(g)
    while True:
        action = g.rng.choice(
            [a for a in g.lexicon.actions["transitive"] if not a.fr_rest and a.en.base != a.en.past]
        )
        noun = g.noun(g.rng.choice(action.objects))
        if noun.kind not in ("kin", "role", "region"):
            break
    amount = "how much" if noun.mass else "how many"
    predicate = Predicate(
        action.en, action.fr, state=action.state, agreement=(noun.gender, not noun.mass)
    )
    manner = _question_manner(g, who, predicate, g.rng.choice(("past", "future", "none")))
    word = f"{amount} {noun.en_plural if noun.mass else _counted_plural(noun)}"
    return question(who, predicate, manner, (word, f"combien de {noun.fr_plural}"))


def _counted_plural(noun: Noun) -> str:
    """The plural after "how many", marked as counted."""
    simple_plural = " " not in noun.en and noun.en_plural == noun.en + "s"
    return mark(noun.en_plural, COUNTED) if simple_plural else noun.en_plural


def _what(g: Words) -> Bilingual:
    who, predicate = _object_question(g)
    period = g.rng.choice(("past", "future", "habit"))
    manner = _question_manner(g, who, predicate, period)
    en, fr = question(who, predicate, manner, ("what", ""))
    fr = fr.strip().replace("est-ce que", "qu'est-ce que", 1)
    when = time(g, period)
    return f"{en} {when[0]}", f"{fr} {when[1]}"


def _who(g: Words) -> Bilingual:
    who = NounPhrase("who", "qui", 1, "m", False, "pronoun")
    return simple(g, who, g.rng.choice(("past", "future", "none")), timed=0, negation=0)


def _where_is(g: Words) -> Bilingual:
    noun = g.noun("item", "clothes", "school", "tool", "place", "kin", "vehicle")
    thing = noun_phrase(
        g,
        noun,
        "my" if noun.kind == "kin" else g.rng.choice(("the", "my", "my+", "owner")),
        modify=0.4,
    )
    past = g.chance(0.25)
    be = ("were" if past else "are") if thing.plural else ("was" if past else "is")
    verb = french.conjugate("être")
    form = (verb.imperfect if past else verb.present)[thing.person]
    return f"where {mark(be, AUXILIARY)} {thing.en}", f"où {form} {thing.fr}"
