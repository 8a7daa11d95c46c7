"""Questions, with "est-ce que" in French: yes or no, where, when, why, how, what, who, how many."""

from demo.recipe import french
from demo.recipe import predicates as say
from demo.recipe.circumstances import time
from demo.recipe.clauses import Manner, Predicate, question
from demo.recipe.english import AUXILIARY, mark
from demo.recipe.phrases import SPACE, Bilingual, NounPhrase, Words, concat, noun_phrase, subject
from demo.recipe.templates import NO_QUESTION, choose_manner, choose_period, simple

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
    """Who does what: never "I", as one seldom asks about oneself, and no verb like "read"."""
    while True:
        who, predicate = subject(g), say.action(g)
        if who.person != 0 and not predicate.en.same_past:
            return who, predicate


def _yes_no(g: Words) -> Bilingual:
    if g.chance(0.25):
        who = subject(g)
        adjective = lambda g: say.being_adjective(g, who)  # noqa: E731
        predicate = g.rng.choice((say.being_somewhere, say.feeling, adjective))(g)
    else:
        who, predicate = _asker(g)
    period = choose_period(g)
    asked = question(who, predicate, _question_manner(g, who, predicate, period))
    if period == "none" or g.chance(0.5):
        return asked
    return concat(asked, SPACE, time(g, period))


def _wh(g: Words) -> Bilingual:
    who, predicate = _asker(g)
    word = g.rng.choice(_WH)
    period = g.rng.choice(("past", "future", "none"))
    return question(who, predicate, _question_manner(g, who, predicate, period), word)


def _how_many(g: Words) -> Bilingual:
    who = subject(g)
    while True:
        action = g.rng.choice(g.lexicon.plain_transitives)
        noun = g.noun(g.rng.choice(action.objects))
        if noun.kind not in ("kin", "role", "region"):
            break
    many = not noun.mass
    predicate = Predicate(action.en, action.fr, state=action.state, agreement=(noun.gender, many))
    manner = _question_manner(g, who, predicate, g.rng.choice(("past", "future", "none")))
    amount = f"how many {noun.en_counted}" if many else f"how much {noun.en}"
    return question(who, predicate, manner, (amount, f"combien de {noun.fr_plural}"))


def _what(g: Words) -> Bilingual:
    action = g.rng.choice([verb for verb in g.lexicon.plain_transitives if not verb.en.rest])
    who, predicate = subject(g), say.from_action(action)
    period = g.rng.choice(("past", "future", "habit"))
    en, fr = question(who, predicate, _question_manner(g, who, predicate, period), ("what", "qu'"))
    return concat((en, fr.replace("qu' ", "qu'", 1)), SPACE, time(g, period))


def _who(g: Words) -> Bilingual:
    who = NounPhrase("who", "qui", 1, "m", False, "pronoun")
    return simple(g, who, g.rng.choice(("past", "future", "none")), timed=0, negation=0)


def _where_is(g: Words) -> Bilingual:
    noun = g.noun("item", "clothes", "school", "tool", "place", "kin", "vehicle")
    mode = "my" if noun.kind == "kin" else g.rng.choice(("the", "my", "my+", "owner"))
    thing = noun_phrase(g, noun, mode, modify=0.4)
    past = g.chance(0.25)
    be = ("were" if past else "are") if thing.plural else ("was" if past else "is")
    verb = french.conjugate("être")
    form = (verb.imperfect if past else verb.present)[thing.person]
    return f"where {mark(be, AUXILIARY)} {thing.en}", f"où {form} {thing.fr}"
