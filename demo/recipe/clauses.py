"""Clauses: a subject and a predicate in any tense, affirmative or negative, statement or question.

Each English tense has one French tense: simple past is the passé composé (imparfait for states),
"was doing" and "used to do" the imparfait, "will" the futur simple, "going to" the futur proche.
"""

from dataclasses import dataclass, replace

from demo.recipe import french
from demo.recipe.english import (
    ADVERB,
    AUXILIARY,
    GERUND,
    INFINITIVE,
    PARTICIPLE,
    PAST,
    PLURAL_FORM,
    THIRD,
    TO,
    Verb,
    mark,
    parse_verb,
    plain,
)
from demo.recipe.phrases import Bilingual, NounPhrase


@dataclass(frozen=True)
class Predicate:
    """Verb and complements, ready for any subject.

    `clitic` is a French object pronoun that stands before the verb; `agreement` the (gender,
    plural) with which a past participle after "avoir" agrees; `negatable` is False where the
    negative would be odd ("did not buy several apples").
    """

    en: Verb
    fr: french.Verb
    en_tail: str = ""
    fr_tail: str = ""
    en_negative: str = ""
    fr_negative: str = ""
    reflexive: bool = False
    state: bool = False
    clitic: str = ""
    agreement: tuple[str, bool] | None = None
    negatable: bool = True

    def tails(self, negative: bool) -> Bilingual:
        """What follows the verb, in English and in French."""
        if negative:
            return self.en_negative or self.en_tail, self.fr_negative or self.fr_tail
        return self.en_tail, self.fr_tail

    def extended(self, en: str, fr: str) -> "Predicate":
        """The same predicate with one more complement."""
        return replace(
            self,
            en_tail=f"{self.en_tail} {en}".strip(),
            fr_tail=f"{self.fr_tail} {fr}".strip(),
            en_negative=self.en_negative and f"{self.en_negative} {en}",
            fr_negative=self.fr_negative and f"{self.fr_negative} {fr}",
        )


@dataclass(frozen=True)
class Manner:
    """Tense, negation (pas, jamais, plus) and adverb of frequency of a clause."""

    tense: str = "present"
    negative: str = ""
    adverb: Bilingual = ("", "")
    contracted: bool = True


# tense: English outer verb and its tense, French outer verb, its tense and link to the infinitive
_OUTER = {
    "have_to": (parse_verb("have"), "present", "devoir", "present", ""),
    "want_to": (parse_verb("want"), "present", "vouloir", "present", ""),
    "wanted_to": (parse_verb("want"), "past", "vouloir", "imperfect", ""),
    "need_to": (parse_verb("need"), "present", "avoir", "present", "besoin de"),
    "like_to": (parse_verb("like"), "present", "aimer", "present", ""),
    "would_like_to": (parse_verb("like"), "conditional", "aimer", "conditional", ""),
    "hope_to": (parse_verb("hope"), "present", "espérer", "present", ""),
    "prefer_to": (parse_verb("prefer"), "present", "préférer", "present", ""),
}
_MODAL = {
    "future": "will",
    "conditional": "would",
    "can": "can",
    "must": "must",
    "should": "should",
}
_HELPER = {
    "can": ("pouvoir", "present", ""),
    "must": ("devoir", "present", ""),
    "should": ("devoir", "conditional", ""),
    "going_to": ("aller", "present", ""),
    "just": ("venir", "present", "de"),
}
_SIMPLE = {
    "present": "present",
    "progressive": "present",
    "past_progressive": "imperfect",
    "used_to": "imperfect",
    "future": "future",
    "conditional": "conditional",
    "when_future": "future",
    "if_past": "imperfect",
}
_NOT = {"am": "am not", "will": "won't", "can": "can't", "must": "must not"}


def ambiguous(predicate: Predicate, manner: Manner, subject: NounPhrase) -> bool:
    """True for "they read", present or past, which has more than one translation."""
    verb = predicate.en
    finite = manner.tense in ("present", "past", "if_past") and subject.person != 1
    undecided = finite or manner.tense == "when_future" or manner.negative == "jamais"
    return verb.same_past and undecided


def _be(subject: NounPhrase, past: bool) -> str:
    if past:
        return mark("was" if subject.person in (0, 1) else "were", AUXILIARY)
    return mark(("am", "is", "are", "are", "are")[subject.person], AUXILIARY)


def _with_rest(word: str, verb: Verb) -> str:
    return f"{word} {verb.rest}".strip()


def _bare(verb: Verb) -> str:
    """The infinitive without "to"."""
    return _with_rest(mark(verb.base, INFINITIVE), verb)


def english_parts(verb: Verb, tense: str, subject: NounPhrase, support: bool) -> tuple[str, str]:
    """(auxiliary, rest): `support` asks for an auxiliary, as questions and "not" need one."""
    if tense in _OUTER:
        outer, outer_tense = _OUTER[tense][:2]
        aux, rest = english_parts(outer, outer_tense, subject, support)
        return aux, f"{rest} {mark('to', TO)} {_bare(verb)}"
    if tense in _MODAL:
        return _MODAL[tense], _bare(verb)
    if tense in ("progressive", "past_progressive"):
        return _be(subject, tense != "progressive"), _with_rest(mark(verb.gerund, GERUND), verb)
    if tense == "going_to":
        return _be(subject, False), f"going {mark('to', TO)} {_bare(verb)}"
    if tense in ("perfect", "just"):
        done = _with_rest(mark(verb.participle, PARTICIPLE), verb)
        aux = mark("has" if subject.person == 1 else "have", AUXILIARY)
        return aux, f"just {done}" if tense == "just" else done
    if tense == "used_to":
        return "", f"used to {_bare(verb)}"
    past = tense in ("past", "if_past")
    if verb.base == "be":
        return _be(subject, past), ""
    return _simple_parts(verb, past, subject, support)


def _simple_parts(verb: Verb, past: bool, subject: NounPhrase, support: bool) -> tuple[str, str]:
    third = subject.person == 1
    if support:
        aux = "did" if past else mark("does" if third else "do", AUXILIARY)
        return aux, _bare(verb)
    if past:
        return "", _with_rest(mark(verb.past, PAST), verb)
    word = mark(verb.third, THIRD) if third else mark(verb.base, PLURAL_FORM)
    return "", _with_rest(word, verb)


def _contract(aux: str, contracted: bool) -> str:
    """The auxiliary with its "not"."""
    word = plain(aux)
    if word in ("am", "must"):
        return _NOT[word]
    if not contracted:
        return "cannot" if word == "can" else f"{aux} not"
    negated = _NOT.get(word, word + "n't")
    return negated + aux[len(word) :]


def english_clause(subject: NounPhrase, predicate: Predicate, manner: Manner) -> str:
    """The statement, with marks."""
    not_ = manner.negative in ("pas", "plus")
    aux, rest = english_parts(predicate.en, manner.tense, subject, not_)
    if not_:
        aux = _contract(aux, manner.contracted)
    adverb = "never" if manner.negative == "jamais" else manner.adverb[0]
    adverb = adverb and mark(adverb, ADVERB)
    tail = predicate.tails(bool(manner.negative))[0]
    end = "anymore" if manner.negative == "plus" else ""
    return _join(subject.en, aux, adverb, rest, tail, end)


def english_question(subject: NounPhrase, predicate: Predicate, manner: Manner) -> str:
    """The question, with marks, without its question word."""
    aux, rest = english_parts(predicate.en, manner.tense, subject, True)
    tail = predicate.en_negative or predicate.en_tail  # "any" rather than "some"
    return _join(aux, subject.en, manner.adverb[0], rest, tail)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def french_clause(subject: NounPhrase, predicate: Predicate, manner: Manner) -> str:
    """The statement, before elision."""
    tail = predicate.tails(bool(manner.negative))[1]
    return _join(subject.fr, french_verb(subject, predicate, manner), tail)


def _clitic(predicate: Predicate, person: int) -> str:
    return french.REFLEXIVE[person] if predicate.reflexive else predicate.clitic


def french_verb(subject: NounPhrase, predicate: Predicate, manner: Manner) -> str:
    """The verb with clitics, negation and adverb."""
    tense, person, verb = manner.tense, subject.person, predicate.fr
    ne, not_, adverb = "ne" if manner.negative else "", manner.negative, manner.adverb[1]
    clitic = _clitic(predicate, person)
    if tense in _HELPER or tense in _OUTER:
        name, form, link = _HELPER.get(tense) or _OUTER[tense][2:]
        finite = getattr(french.conjugate(name), form)[person]
        return _join(ne, finite, not_, adverb, link, clitic, verb.infinitive)
    if tense in ("past", "perfect") and not predicate.state:
        return _compound(subject, predicate, ne, not_, adverb, clitic)
    form = "imperfect" if tense in ("past", "perfect") else _SIMPLE[tense]
    return _join(ne, clitic, getattr(verb, form)[person], not_, adverb)


def _compound(
    subject: NounPhrase, predicate: Predicate, ne: str, not_: str, adverb: str, clitic: str
) -> str:
    """The passé composé."""
    verb = predicate.fr
    with_etre = predicate.reflexive or verb.auxiliary == "être"
    participle = verb.participle
    if with_etre:
        participle = french.agree(participle, subject.gender, subject.plural)
    elif predicate.agreement:
        participle = french.agree(participle, *predicate.agreement)
    auxiliary = french.conjugate("être" if with_etre else "avoir").present[subject.person]
    return _join(ne, clitic, auxiliary, not_, adverb, participle)


def clause(subject: NounPhrase, predicate: Predicate, manner: Manner) -> Bilingual:
    """A statement in both languages, without capital and full stop."""
    return english_clause(subject, predicate, manner), french_clause(subject, predicate, manner)


def question(
    subject: NounPhrase, predicate: Predicate, manner: Manner, word: Bilingual = ("", "")
) -> Bilingual:
    """A question with "est-ce que"; `word` is an English and French question word."""
    en = _join(word[0], english_question(subject, predicate, manner))
    positive = replace(manner, negative="")
    return en, _join(word[1], "est-ce que", french_clause(subject, predicate, positive))


def imperative(predicate: Predicate, person: int, negative: bool = False) -> Bilingual:
    """A command: person 3 "close the door", person 2 "let's close the door"."""
    base = _bare(predicate.en)
    en_tail, fr_tail = predicate.tails(negative)
    lead = {(2, False): "let's", (2, True): "let's not", (3, False): "", (3, True): "don't"}
    en = _join(lead[person, negative], base, en_tail)
    finite, clitic = predicate.fr.imperative(person), _clitic(predicate, person)
    if negative:
        return en, _join("ne", clitic, finite, "pas", fr_tail)
    return en, _join(f"{finite}-{clitic}" if clitic else finite, fr_tail)


def infinitive(predicate: Predicate, person: int) -> Bilingual:
    """ "to buy some bread" without "to"; a reflexive pronoun agrees with `person`."""
    base = _bare(predicate.en)
    return (
        _join(base, predicate.en_tail),
        _join(_clitic(predicate, person), predicate.fr.infinitive, predicate.fr_tail),
    )


def gerund(predicate: Predicate, person: int) -> Bilingual:
    """ "buying some bread" with a French infinitive ("avant de", "sans")."""
    return (
        _join(_with_rest(predicate.en.gerund, predicate.en), predicate.en_tail),
        infinitive(predicate, person)[1],
    )
