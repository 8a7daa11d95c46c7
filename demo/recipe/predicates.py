"""Predicates: what can be said of a subject, drawn at random. Docstrings show what is made."""

import re
from dataclasses import replace

from demo.recipe import french
from demo.recipe.circumstances import destination, place
from demo.recipe.clauses import Predicate
from demo.recipe.english import MANY, Verb, mark, number
from demo.recipe.lexicon import Action, Noun
from demo.recipe.phrases import (
    SINGULAR_KIN,
    NounPhrase,
    Words,
    adjective_for,
    generic,
    list_of,
    noun_phrase,
    person,
)

_BE = Verb("be", "was", "been")
_LISTED = ("food", "vegetable", "drink", "clothes", "item")
_MANNER_VERBS = ("work", "travel", "sleep", "paint", "cook", "wait")


def from_action(action: Action, en: str = "", fr: str = "") -> Predicate:
    """The verb of a lexicon entry with a complement."""
    return Predicate(
        action.en,
        action.fr,
        en,
        f"{action.fr_rest} {fr}".strip(),
        reflexive=action.reflexive,
        state=action.state,
    )


def with_object(action: Action, thing: NounPhrase) -> Predicate:
    """A transitive verb with its object, contracting the preposition that French may need."""
    rest = action.fr_rest
    with_a, with_de = (rest.rpartition(" ")[2] == word for word in ("à", "de"))
    negative = f"{rest} {thing.fr_negative}".strip() if thing.fr_negative else ""
    return replace(
        from_action(action),
        negatable=thing.negatable,
        en_tail=thing.en,
        fr_tail=thing.after(rest),
        en_negative="" if with_a else thing.en_negative,
        fr_negative="" if with_a or with_de else negative,
    )


def thing_for(g: Words, action: Action, modify: float = 0.3) -> NounPhrase:
    """A noun phrase that the verb can take."""
    kind = g.rng.choice(action.objects)
    if kind == "person" and action.en.base != "have":
        return person(g)
    noun = g.noun(kind)
    if noun.kind == "kin":  # "have two brothers"
        mode = "a" if noun.en in SINGULAR_KIN else g.rng.choice(("a", "number+", "several+"))
        return noun_phrase(g, noun, mode, modify=0)
    return noun_phrase(g, noun, modify=modify)


def transitive(g: Words) -> Predicate:
    """Verb and object."""
    action = g.rng.choice(g.lexicon.actions["transitive"])
    if action.clitic and g.chance(0.3):
        return with_pronoun(g, action)
    if g.chance(0.12) and action.objects[0] in _LISTED and not action.fr_rest:
        kinds = [c for c in action.objects if ":" not in c and c != "region"]
        return with_object(action, list_of(g, (g.rng.choice(kinds),)))
    return with_object(action, thing_for(g, action))


def with_pronoun(g: Words, action: Action) -> Predicate:
    """ "calls her" -> "l'appelle"."""
    en, fr, gender, many = g.rng.choice(
        (("him", "le", "m", False), ("her", "la", "f", False), ("them", "les", "m", True))
    )
    return replace(from_action(action), en_tail=en, clitic=fr, agreement=(gender, many))


def liking(g: Words) -> Predicate:
    """like, love, hate, prefer + everything of a kind."""
    action = g.rng.choice(g.lexicon.actions["liking"])
    first = generic(g.noun(g.rng.choice(action.objects)))
    if g.chance(0.35):
        second = generic(g.noun(g.rng.choice(action.objects)))
        if second.en != first.en:
            return from_action(action, f"{first.en} and {second.en}", f"{first.fr} et {second.fr}")
    return from_action(action, first.en, first.fr)


def giving(g: Words) -> Predicate:
    """give something to somebody."""
    action = g.rng.choice(g.lexicon.actions["giving"])
    receiver = person(g)
    given = with_object(action, thing_for(g, action, modify=0.2))
    return given.extended(f"to {receiver.en}", receiver.with_a())


def intransitive(g: Words) -> Predicate:
    """work, go to bed, play the piano ..., now and then with a manner or company."""
    action = g.rng.choice(g.lexicon.actions["intransitive"])
    predicate = replace(from_action(action), fr_negative=_negated_rest(action))
    draw = g.rng.random()
    if draw < 0.2:
        friend = person(g)
        return predicate.extended(f"with {friend.en}", f"avec {friend.fr}")
    if draw < 0.3 and action.en.base in _MANNER_VERBS:
        return predicate.extended(*g.phrase("manner"))
    return predicate


def _negated_rest(action: Action) -> str:
    """ "prend une douche" -> "ne prend pas de douche" (but "ne joue pas du piano")."""
    match = re.match("(?:de la|des|une|un|du) (.*)", action.fr_rest)
    return f"de {match[1]}" if match and action.fr.infinitive != "jouer" else ""


def motion(g: Words) -> Predicate:
    """go to a place, perhaps by some means or with somebody."""
    predicate = from_action(g.rng.choice(g.lexicon.actions["motion"]), *destination(g))
    draw = g.rng.random()
    if draw < 0.35:
        predicate = predicate.extended(*g.phrase("means"))
    elif draw < 0.5:
        friend = person(g)
        predicate = predicate.extended(f"with {friend.en}", f"avec {friend.fr}")
    return predicate


def action(g: Words) -> Predicate:
    """Anything a person can do."""
    make = g.rng.choices((transitive, giving, intransitive, motion), (10, 2, 6, 3))[0]
    return make(g)


def doing(g: Words) -> Predicate:
    """An action that is no state: fit for commands, "going to", "would like to"."""
    while (predicate := action(g)).state:
        pass
    return predicate


def feeling(g: Words) -> Predicate:
    """be hungry -> avoir faim."""
    en, fr = g.phrase("feeling")
    negative = fr.replace("de la ", "de ") if fr.startswith("de la ") else ""
    return Predicate(_BE, french.conjugate("avoir"), en, fr, fr_negative=negative, state=True)


def age(g: Words) -> Predicate:
    """be ten years old -> avoir dix ans."""
    n = g.rng.randint(2, 99)
    en, fr = f"{number(n)} years old", f"{french.number(n)} ans"
    return Predicate(_BE, french.conjugate("avoir"), en, fr, state=True)


def being(en: str, fr: str) -> Predicate:
    """be + complement."""
    return Predicate(_BE, french.conjugate("être"), en, fr, state=True)


def being_adjective(g: Words, subject: NounPhrase, noun: Noun | None = None) -> Predicate:
    """be + adjective that agrees with the subject, a person or what `noun` names."""
    classes = noun.classes if noun else {"person"}
    adjective = None
    while adjective is None:
        adjective = adjective_for(g, classes, "state" if g.chance(0.5) else "attribute")
    draw = g.rng.random()
    en, fr = adjective.en, adjective.form(subject.gender, subject.plural)
    if draw < 0.2 and adjective.comparative:
        return being(f"very {en}", f"très {fr}")
    if draw < 0.3 and adjective.comparative:
        return being(f"too {en}", f"trop {fr}")
    return being(en, fr)


def comparing(g: Words, subject: NounPhrase, noun: Noun) -> Predicate:
    """be bigger than, as big as, less ... than something of the same kind."""
    attributes = g.lexicon.adjectives["attribute"]
    fitting = [a for a in attributes if a.comparative and not a.classes.isdisjoint(noun.classes)]
    if not fitting:
        return being_adjective(g, subject, noun)
    adjective = g.rng.choice(fitting)
    other = noun_phrase(g, noun, g.rng.choice(("my", "this", "owner")), modify=0)
    fr = adjective.form(subject.gender, subject.plural)
    if g.chance(0.6):
        more = mark(adjective.comparative, MANY)
        return being(f"{more} than {other.en}", f"plus {fr} que {other.fr}")
    if g.chance(0.7):
        return being(f"as {adjective.en} as {other.en}", f"aussi {fr} que {other.fr}")
    return being(f"less {adjective.en} than {other.en}", f"moins {fr} que {other.fr}")


def being_somewhere(g: Words) -> Predicate:
    """be in the kitchen."""
    return being(*place(g))


def being_job(g: Words, subject: NounPhrase) -> Predicate:
    """be a doctor -> être médecin."""
    job = g.rng.choice(g.lexicon.nouns["job"])
    if subject.plural:
        return being(job.en_plural, job.fr_plural)
    return being(noun_phrase(g, job, "a", modify=0).en, job.fr)


def shopping(g: Words, category: Noun) -> Predicate:
    """buy some groceries including eggs, avocadoes, and bread."""
    items = list_of(g, category.members)
    en = f"some {category.en} including {items.en}"
    fr = f"des {category.fr}, notamment {items.fr}"
    return replace(from_action(g.verb("buy"), en, fr), negatable=False)
