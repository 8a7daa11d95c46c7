"""The demonstration's grammar: literal cases of each phenomenon, in both languages."""

import random
from dataclasses import replace

import pytest

from demo.recipe import english, french
from demo.recipe import predicates as say
from demo.recipe.circumstances import clock
from demo.recipe.clauses import Manner, Predicate, clause, imperative, question
from demo.recipe.english import Verb, plain
from demo.recipe.phrases import NounPhrase, Words, bare, generic, noun_phrase

HE = NounPhrase("he", "il", 1, "m")
SHE = NounPhrase("she", "elle", 1, "f")
THEY = NounPhrase("they", "ils", 4, "m", True)
WE = NounPhrase("we", "nous", 2, "m", True)
I_ = NounPhrase("I", "je", 0, "m")


@pytest.fixture
def words():
    """The lexicon with a fixed source of randomness."""
    return Words(random.Random(0))


def the_noun(words: Words, english: str):
    return next(n for nouns in words.lexicon.nouns.values() for n in nouns if n.en == english)


def the_action(words: Words, section: str, base: str):
    return next(a for a in words.lexicon.actions[section] if a.en.base == base)


def said(subject: NounPhrase, predicate: Predicate, manner: Manner) -> str:
    en, fr = clause(subject, predicate, manner)
    return f"{plain(en)} | {french.elide(fr)}"


# -- French word forms ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("je aime le ami de Anna", "j'aime l'ami d'Anna"),
        ("la école que il ne a pas", "l'école qu'il n'a pas"),
        ("le haricot vert et le yaourt", "le haricot vert et le yaourt"),
        ("si il pleut, si elle vient", "s'il pleut, si elle vient"),
        ("il se habille parce que on me attend", "il s'habille parce qu'on m'attend"),
        ("de onze à huit", "de onze à huit"),
        ("il ne y a pas de eau", "il n'y a pas d'eau"),
        ("suivez-la et attendez-le ici", "suivez-la et attendez-le ici"),
    ],
)
def test_elision(written, spoken):
    assert french.elide(written) == spoken


@pytest.mark.parametrize(
    ("phrase", "to", "of"),
    [
        ("le marché", "au marché", "du marché"),
        ("les enfants", "aux enfants", "des enfants"),
        ("la gare", "à la gare", "de la gare"),
        ("le hôtel", "à le hôtel", "de le hôtel"),
        ("Paul", "à Paul", "de Paul"),
        ("mes amis", "à mes amis", "de mes amis"),
    ],
)
def test_contraction(phrase, to, of):
    assert (french.with_a(phrase), french.with_de(phrase)) == (to, of)


@pytest.mark.parametrize(
    ("infinitive", "present", "imperfect", "future", "participle"),
    [
        ("manger", "mange mange mangeons mangez mangent", "mangions", "mangerai", "mangé"),
        (
            "commencer",
            "commence commence commençons commencez commencent",
            "commencions",
            "commencerai",
            "commencé",
        ),
        ("acheter", "achète achète achetons achetez achètent", "achetions", "achèterai", "acheté"),
        (
            "appeler",
            "appelle appelle appelons appelez appellent",
            "appelions",
            "appellerai",
            "appelé",
        ),
        (
            "préférer",
            "préfère préfère préférons préférez préfèrent",
            "préférions",
            "préférerai",
            "préféré",
        ),
        (
            "dépêcher",
            "dépêche dépêche dépêchons dépêchez dépêchent",
            "dépêchions",
            "dépêcherai",
            "dépêché",
        ),
        (
            "nettoyer",
            "nettoie nettoie nettoyons nettoyez nettoient",
            "nettoyions",
            "nettoierai",
            "nettoyé",
        ),
        ("finir", "finis finit finissons finissez finissent", "finissions", "finirai", "fini"),
        ("vendre", "vends vend vendons vendez vendent", "vendions", "vendrai", "vendu"),
        ("être", "suis est sommes êtes sont", "étions", "serai", "été"),
        ("faire", "fais fait faisons faites font", "faisions", "ferai", "fait"),
        (
            "comprendre",
            "comprends comprend comprenons comprenez comprennent",
            "comprenions",
            "comprendrai",
            "compris",
        ),
        (
            "construire",
            "construis construit construisons construisez construisent",
            "construisions",
            "construirai",
            "construit",
        ),
        ("sourire", "souris sourit sourions souriez sourient", "souriions", "sourirai", "souri"),
    ],
)
def test_conjugation(infinitive, present, imperfect, future, participle):
    verb = french.conjugate(infinitive)
    assert " ".join(verb.present) == present
    assert (verb.imperfect[2], verb.future[0], verb.participle) == (imperfect, future, participle)


def test_unknown_verb_is_refused_with_a_cure():
    with pytest.raises(ValueError, match="irregular"):
        french.conjugate("xyz")


@pytest.mark.parametrize(
    ("n", "gender", "fr", "en"),
    [
        (1, "f", "une", "one"),
        (21, "f", "vingt et une", "twenty-one"),
        (22, "m", "vingt-deux", "twenty-two"),
        (71, "m", "soixante et onze", "seventy-one"),
        (80, "m", "quatre-vingts", "eighty"),
        (81, "f", "quatre-vingt-une", "eighty-one"),
        (91, "m", "quatre-vingt-onze", "ninety-one"),
        (99, "m", "quatre-vingt-dix-neuf", "ninety-nine"),
        (100, "m", "cent", "one hundred"),
        (200, "m", "deux cents", "two hundred"),
        (280, "m", "deux cent quatre-vingts", "two hundred eighty"),
        (342, "m", "trois cent quarante-deux", "three hundred forty-two"),
    ],
)
def test_numbers(n, gender, fr, en):
    assert (french.number(n, gender), english.number(n)) == (fr, en)


# -- phenomena -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "noun", "mode", "expected"),
    [
        ("buy", "egg", "some+", "he buys some eggs | il achète des œufs"),
        ("buy", "bread", "some", "he buys some bread | il achète du pain"),
        ("buy", "jam", "some", "he buys some jam | il achète de la confiture"),
        ("drink", "water", "some", "he drinks some water | il boit de l'eau"),
        ("buy", "apple", "a", "he buys an apple | il achète une pomme"),
        ("buy", "avocado", "several+", "he buys several avocadoes | il achète plusieurs avocats"),
        ("buy", "bread", "lot", "he buys a lot of bread | il achète beaucoup de pain"),
        ("clean", "oven", "the", "he cleans the oven | il nettoie le four"),
    ],
)
def test_articles_and_partitives(words, verb, noun, mode, expected):
    thing = noun_phrase(words, the_noun(words, noun), mode, modify=0)
    assert said(HE, say.with_object(words.verb(verb), thing), Manner()) == expected


def test_negation_takes_de(words):
    eggs = noun_phrase(words, the_noun(words, "egg"), "some+", modify=0)
    predicate = say.with_object(words.verb("buy"), eggs)
    assert (
        said(SHE, predicate, Manner("past", "pas"))
        == "she didn't buy any eggs | elle n'a pas acheté d'œufs"
    )
    assert (
        said(HE, predicate, Manner("present", "jamais"))
        == "he never buys any eggs | il n'achète jamais d'œufs"
    )
    assert (
        said(HE, predicate, Manner("present", "plus", contracted=False))
        == "he does not buy any eggs anymore | il n'achète plus d'œufs"
    )


def test_plural_article_before_an_adjective_that_precedes(words):
    old = next(a for a in words.lexicon.adjectives["attribute"] if a.en == "old")
    red = next(a for a in words.lexicon.adjectives["attribute"] if a.en == "red")
    computer = the_noun(words, "computer")
    assert noun_phrase(words, computer, "some+", old).fr == "de vieux ordinateurs"
    assert noun_phrase(words, computer, "a", old).fr == "un vieil ordinateur"
    assert noun_phrase(words, the_noun(words, "car"), "some+", red).fr == "des voitures rouges"


def test_determiners_before_a_vowel():
    assert french.possessive("my", "f", False, "école") == "mon"
    assert french.possessive("my", "f", False, "vieille école") == "ma"
    words = Words(random.Random(0))
    coat, shelf = the_noun(words, "raincoat"), the_noun(words, "shelf")
    assert noun_phrase(words, coat, "this", modify=0).fr == "cet imperméable"
    assert noun_phrase(words, shelf, "this", modify=0).fr == "cette étagère"


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (SHE, "she went home | elle est rentrée à la maison"),
        (THEY, "they went home | ils sont rentrés à la maison"),
        (I_, "I went home | je suis rentré à la maison"),
    ],
)
def test_participle_agrees_with_the_subject_after_etre(words, subject, expected):
    action = next(
        a
        for a in words.lexicon.actions["intransitive"]
        if a.en.base == "go" and a.en.rest == "home"
    )
    assert said(subject, say.from_action(action), Manner("past")) == expected


def test_participle_agrees_with_a_preceding_object(words):
    call = words.verb("call")
    her = replace(say.from_action(call), en_tail="her", clitic="la", agreement=("f", False))
    them = replace(say.from_action(call), en_tail="them", clitic="les", agreement=("m", True))
    assert said(HE, her, Manner("past")) == "he called her | il l'a appelée"
    assert (
        said(WE, them, Manner("past", "pas"))
        == "we didn't call them | nous ne les avons pas appelés"
    )
    assert said(HE, her, Manner("going_to")) == "he is going to call her | il va l'appeler"


def test_reflexive_verbs(words):
    rest = the_action(words, "intransitive", "rest")
    assert said(SHE, say.from_action(rest), Manner("past")) == "she rested | elle s'est reposée"
    assert (
        said(WE, say.from_action(rest), Manner("want_to"))
        == "we want to rest | nous voulons nous reposer"
    )
    assert imperative(say.from_action(rest), 3)[1] == "reposez-vous"
    assert (
        french.elide(imperative(say.from_action(rest), 2, negative=True)[1])
        == "ne nous reposons pas"
    )


@pytest.mark.parametrize(
    ("tense", "expected"),
    [
        ("present", "he has a dog | il a un chien"),
        ("past", "he had a dog | il avait un chien"),
        ("future", "he will have a dog | il aura un chien"),
        ("going_to", "he is going to have a dog | il va avoir un chien"),
        ("can", "he can have a dog | il peut avoir un chien"),
        ("need_to", "he needs to have a dog | il a besoin d'avoir un chien"),
        ("would_like_to", "he would like to have a dog | il aimerait avoir un chien"),
        ("should", "he should have a dog | il devrait avoir un chien"),
    ],
)
def test_tenses(words, tense, expected):
    dog = noun_phrase(words, the_noun(words, "dog"), "a", modify=0)
    assert said(HE, say.with_object(words.verb("have"), dog), Manner(tense)) == expected


def test_prepositions_that_contract_with_the_object(words):
    need, answer = words.verb("need"), words.verb("answer")
    ladder = the_noun(words, "ladder")
    for mode, expected in (
        ("a", "il a besoin d'une échelle"),
        ("the+", "il a besoin des échelles"),
        ("some+", "il a besoin d'échelles"),
    ):
        thing = noun_phrase(words, ladder, mode, modify=0)
        assert said(HE, say.with_object(need, thing), Manner()).endswith(f"| {expected}")
    message = noun_phrase(words, the_noun(words, "message"), "the", modify=0)
    assert said(HE, say.with_object(answer, message), Manner()).endswith("il répond au message")


def test_generic_and_listed_nouns(words):
    assert generic(the_noun(words, "apple")).fr == "les pommes"
    assert generic(the_noun(words, "bread")).fr == "le pain"
    assert bare(the_noun(words, "jam")).fr == "de la confiture"


def test_questions(words):
    action = the_action(words, "intransitive", "work")
    en, fr = question(SHE, say.from_action(action), Manner("past"), ("why", "pourquoi"))
    assert (plain(en), french.elide(fr)) == (
        "why did she work",
        "pourquoi est-ce qu'elle a travaillé",
    )


def test_times_of_the_clock():
    seen = {clock(Words(random.Random(i))) for i in range(300)}
    french_of = {plain(en): fr for en, fr in seen}
    assert french_of["at one o'clock"] == "à une heure"
    assert french_of["at half past seven"] == "à sept heures et demie"
    assert french_of["at a quarter to nine"] == "à neuf heures moins le quart"


def test_english_verbs():
    forms = [Verb(b, "", "").gerund for b in ("swim", "use", "study", "be")]
    assert forms == ["swimming", "using", "studying", "being"]
    assert [Verb(b, "", "").third for b in ("go", "carry", "play", "watch")] == [
        "goes",
        "carries",
        "plays",
        "watches",
    ]
