"""The demonstration's grammar, error generator and corpus."""

import itertools
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from demo import corpus, english, errors, french, grammar, lexicon, number_words
from demo import predicates as say
from demo.circumstances import clock
from demo.clauses import Manner, Predicate, clause, imperative, question
from demo.english import Verb, plain
from demo.phrases import NounPhrase, Words, bare, generic, noun_phrase, possessive

HE = NounPhrase("he", "il", 1, "m")
SHE = NounPhrase("she", "elle", 1, "f")
THEY = NounPhrase("they", "ils", 4, "m", True)
WE = NounPhrase("we", "nous", 2, "m", True)
I_ = NounPhrase("I", "je", 0, "m")


@pytest.fixture(scope="module")
def pairs():
    """A few thousand sentences."""
    rng = random.Random(11)
    return [grammar.sample(rng) for _ in range(5000)]


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


# -- French by the letter ------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "spoken"), [
    ("je aime le ami de Anna", "j'aime l'ami d'Anna"),
    ("la école que il ne a pas", "l'école qu'il n'a pas"),
    ("le haricot vert et le yaourt", "le haricot vert et le yaourt"),
    ("si il pleut, si elle vient", "s'il pleut, si elle vient"),
    ("il se habille parce que on me attend", "il s'habille parce qu'on m'attend"),
    ("de onze à huit", "de onze à huit"),
    ("il ne y a pas de eau", "il n'y a pas d'eau"),
    ("suivez-la et attendez-le ici", "suivez-la et attendez-le ici"),
])
def test_elision(written, spoken):
    assert french.elide(written) == spoken


@pytest.mark.parametrize(("phrase", "to", "of"), [
    ("le marché", "au marché", "du marché"), ("les enfants", "aux enfants", "des enfants"),
    ("la gare", "à la gare", "de la gare"), ("le hôtel", "à le hôtel", "de le hôtel"),
    ("Paul", "à Paul", "de Paul"), ("mes amis", "à mes amis", "de mes amis"),
])
def test_contraction(phrase, to, of):
    assert (french.to(phrase), french.of(phrase)) == (to, of)


@pytest.mark.parametrize(("infinitive", "present", "imperfect", "future", "participle"), [
    ("manger", "mange mange mangeons mangez mangent", "mangions", "mangerai", "mangé"),
    ("commencer", "commence commence commençons commencez commencent", "commencions",
     "commencerai", "commencé"),
    ("acheter", "achète achète achetons achetez achètent", "achetions", "achèterai", "acheté"),
    ("appeler", "appelle appelle appelons appelez appellent", "appelions", "appellerai", "appelé"),
    ("préférer", "préfère préfère préférons préférez préfèrent", "préférions", "préférerai",
     "préféré"),
    ("dépêcher", "dépêche dépêche dépêchons dépêchez dépêchent", "dépêchions", "dépêcherai",
     "dépêché"),
    ("nettoyer", "nettoie nettoie nettoyons nettoyez nettoient", "nettoyions", "nettoierai",
     "nettoyé"),
    ("finir", "finis finit finissons finissez finissent", "finissions", "finirai", "fini"),
    ("vendre", "vends vend vendons vendez vendent", "vendions", "vendrai", "vendu"),
    ("être", "suis est sommes êtes sont", "étions", "serai", "été"),
    ("faire", "fais fait faisons faites font", "faisions", "ferai", "fait"),
    ("comprendre", "comprends comprend comprenons comprenez comprennent", "comprenions",
     "comprendrai", "compris"),
    ("construire", "construis construit construisons construisez construisent", "construisions",
     "construirai", "construit"),
    ("sourire", "souris sourit sourions souriez sourient", "souriions", "sourirai", "souri"),
])
def test_conjugation(infinitive, present, imperfect, future, participle):
    verb = french.conjugate(infinitive)
    assert " ".join(verb.present) == present
    assert (verb.imperfect[2], verb.future[0], verb.participle) == (imperfect, future, participle)


def test_unknown_verb_is_refused_with_a_cure():
    with pytest.raises(ValueError, match="irregular"):
        french.conjugate("xyz")


@pytest.mark.parametrize(("n", "gender", "fr", "en"), [
    (1, "f", "une", "one"), (21, "f", "vingt et une", "twenty-one"), (22, "m", "vingt-deux",
     "twenty-two"), (71, "m", "soixante et onze", "seventy-one"), (80, "m", "quatre-vingts",
     "eighty"), (81, "f", "quatre-vingt-une", "eighty-one"), (91, "m", "quatre-vingt-onze",
     "ninety-one"), (99, "m", "quatre-vingt-dix-neuf", "ninety-nine"), (100, "m", "cent",
     "one hundred"), (200, "m", "deux cents", "two hundred"), (280, "m", "deux cent quatre-vingts",
     "two hundred eighty"), (342, "m", "trois cent quarante-deux", "three hundred forty-two"),
])
def test_numbers(n, gender, fr, en):
    assert (number_words.french(n, gender), number_words.english(n)) == (fr, en)


# -- phenomena -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "noun", "mode", "expected"), [
    ("buy", "egg", "some+", "he buys some eggs | il achète des œufs"),
    ("buy", "bread", "some", "he buys some bread | il achète du pain"),
    ("buy", "jam", "some", "he buys some jam | il achète de la confiture"),
    ("drink", "water", "some", "he drinks some water | il boit de l'eau"),
    ("buy", "apple", "a", "he buys an apple | il achète une pomme"),
    ("buy", "avocado", "several+", "he buys several avocadoes | il achète plusieurs avocats"),
    ("buy", "bread", "lot", "he buys a lot of bread | il achète beaucoup de pain"),
    ("clean", "oven", "the", "he cleans the oven | il nettoie le four"),
])
def test_articles_and_partitives(words, verb, noun, mode, expected):
    thing = noun_phrase(words, the_noun(words, noun), mode, modify=0)
    assert said(HE, say.with_object(words.verb(verb), thing), Manner()) == expected


def test_negation_takes_de(words):
    eggs = noun_phrase(words, the_noun(words, "egg"), "some+", modify=0)
    predicate = say.with_object(words.verb("buy"), eggs)
    assert said(SHE, predicate, Manner("past", "pas")) == \
        "she didn't buy any eggs | elle n'a pas acheté d'œufs"
    assert said(HE, predicate, Manner("present", "jamais")) == \
        "he never buys any eggs | il n'achète jamais d'œufs"
    assert said(HE, predicate, Manner("present", "plus", contracted=False)) == \
        "he does not buy any eggs anymore | il n'achète plus d'œufs"


def test_plural_article_before_an_adjective_that_precedes(words):
    old = next(a for a in words.lexicon.adjectives["attribute"] if a.en == "old")
    red = next(a for a in words.lexicon.adjectives["attribute"] if a.en == "red")
    computer = the_noun(words, "computer")
    assert noun_phrase(words, computer, "some+", old).fr == "de vieux ordinateurs"
    assert noun_phrase(words, computer, "a", old).fr == "un vieil ordinateur"
    assert noun_phrase(words, the_noun(words, "car"), "some+", red).fr == "des voitures rouges"


def test_determiners_before_a_vowel():
    assert possessive("my", "f", False, "école") == "mon"
    assert possessive("my", "f", False, "vieille école") == "ma"
    words = Words(random.Random(0))
    coat, shelf = the_noun(words, "raincoat"), the_noun(words, "shelf")
    assert noun_phrase(words, coat, "this", modify=0).fr == "cet imperméable"
    assert noun_phrase(words, shelf, "this", modify=0).fr == "cette étagère"


@pytest.mark.parametrize(("subject", "expected"), [
    (SHE, "she went home | elle est rentrée à la maison"),
    (THEY, "they went home | ils sont rentrés à la maison"),
    (I_, "I went home | je suis rentré à la maison"),
])
def test_participle_agrees_with_the_subject_after_etre(words, subject, expected):
    action = next(a for a in words.lexicon.actions["intransitive"]
                  if a.en.base == "go" and a.en.rest == "home")
    assert said(subject, say.from_action(action), Manner("past")) == expected


def test_participle_agrees_with_a_preceding_object(words):
    call = words.verb("call")
    her = replace(say.from_action(call), en_tail="her", clitic="la", agreement=("f", False))
    them = replace(say.from_action(call), en_tail="them", clitic="les", agreement=("m", True))
    assert said(HE, her, Manner("past")) == "he called her | il l'a appelée"
    assert said(WE, them, Manner("past", "pas")) == \
        "we didn't call them | nous ne les avons pas appelés"
    assert said(HE, her, Manner("going_to")) == "he is going to call her | il va l'appeler"


def test_reflexive_verbs(words):
    rest = the_action(words, "intransitive", "rest")
    assert said(SHE, say.from_action(rest), Manner("past")) == "she rested | elle s'est reposée"
    assert said(WE, say.from_action(rest), Manner("want_to")) == \
        "we want to rest | nous voulons nous reposer"
    assert imperative(say.from_action(rest), 3)[1] == "reposez-vous"
    assert french.elide(imperative(say.from_action(rest), 2, negative=True)[1]) == \
        "ne nous reposons pas"


@pytest.mark.parametrize(("tense", "expected"), [
    ("present", "he has a dog | il a un chien"), ("past", "he had a dog | il avait un chien"),
    ("future", "he will have a dog | il aura un chien"),
    ("going_to", "he is going to have a dog | il va avoir un chien"),
    ("can", "he can have a dog | il peut avoir un chien"),
    ("need_to", "he needs to have a dog | il a besoin d'avoir un chien"),
    ("would_like_to", "he would like to have a dog | il aimerait avoir un chien"),
    ("should", "he should have a dog | il devrait avoir un chien"),
])
def test_tenses(words, tense, expected):
    dog = noun_phrase(words, the_noun(words, "dog"), "a", modify=0)
    assert said(HE, say.with_object(words.verb("have"), dog), Manner(tense)) == expected


def test_prepositions_that_contract_with_the_object(words):
    need, answer = words.verb("need"), words.verb("answer")
    ladder = the_noun(words, "ladder")
    for mode, expected in (("a", "il a besoin d'une échelle"), ("the+", "il a besoin des échelles"),
                           ("some+", "il a besoin d'échelles")):
        thing = noun_phrase(words, ladder, mode, modify=0)
        assert said(HE, say.with_object(need, thing), Manner()).endswith(f"| {expected}")
    message = noun_phrase(words, the_noun(words, "message"), "the", modify=0)
    assert said(HE, say.with_object(answer, message), Manner()).endswith("il répond au message")


def test_generic_and_listed_nouns(words):
    assert generic(the_noun(words, "apple")).fr == "les pommes"
    assert generic(the_noun(words, "bread")).fr == "le pain"
    assert bare(words, the_noun(words, "jam")).fr == "de la confiture"


def test_questions(words):
    action = the_action(words, "intransitive", "work")
    en, fr = question(SHE, say.from_action(action), Manner("past"), ("why", "pourquoi"))
    assert (plain(en), french.elide(fr)) == \
        ("why did she work", "pourquoi est-ce qu'elle a travaillé")


def test_computertimes():
    seen = {clock(Words(random.Random(i))) for i in range(300)}
    french_of = {plain(en): fr for en, fr in seen}
    assert french_of["at one o'clock"] == "à une heure"
    assert french_of["at half past seven"] == "à sept heures et demie"
    assert french_of["at a quarter to nine"] == "à neuf heures moins le quart"


def test_english_verbs():
    forms = [Verb(b, "", "").gerund for b in ("swim", "use", "study", "be")]
    assert forms == ["swimming", "using", "studying", "being"]
    assert [Verb(b, "", "").third for b in ("go", "carry", "play", "watch")] == \
        ["goes", "carries", "plays", "watches"]


# -- the sampled distribution --------------------------------------------------------------------


def test_equal_seeds_give_equal_sentences():
    first, second = random.Random(3), random.Random(3)
    assert [grammar.sample(first) for _ in range(50)] == \
        [grammar.sample(second) for _ in range(50)]


def test_one_english_sentence_has_one_translation(pairs):
    translations = {}
    rng = random.Random(12)
    more = [grammar.sample(rng) for _ in range(5000)]
    for pair in pairs + more:
        assert translations.setdefault(pair.en, pair.fr) == pair.fr


def test_lexicon_has_one_french_word_for_an_english_one():
    for entries in (lexicon.load().nouns.values(), lexicon.load().adjectives.values()):
        french_of = {}
        for entry in itertools.chain.from_iterable(entries):
            # "cup" is a thing and a container, "doctor" a role and a profession: the same word
            form = entry.fr if isinstance(entry.fr, str) else entry.fr[0]
            assert french_of.setdefault(entry.en, form) == form


def test_sentences_have_5_to_40_words_and_end_properly(pairs):
    for pair in pairs:
        assert 5 <= len(pair.en.split()) <= 40
        assert pair.en[0].isupper() and pair.fr[0].isupper()
        assert (pair.en[-1], pair.fr[-1]) in ((".", "."), ("?", "?"))
        assert not re.search(r"[\ue000-\ue0ff]", pair.en + pair.fr)


def test_sentences_vary(pairs):
    assert len({pair.en for pair in pairs}) > 0.98 * len(pairs)
    lengths = Counter(len(pair.en.split()) // 10 for pair in pairs)
    assert lengths[0] and lengths[1] and lengths[2]


@pytest.mark.parametrize("wrong", [
    r"\bà les?\b", r"(?<!besoin )(?<!vien[st] )(?<!venons )(?<!venez )(?<!viennent )(?<!avant )"
    r"\bde le\b", r"(?<![-\w])(je|ne|me|se|le|la|que) [aeouéèêiî]", r"\bde [aeouéèêiî]\w",
    r"\b(ma|sa) [aeouéèêiî]", r"\bun [a-zé]+e rouge", r"  ", r" [,.]", r"\bde des\b", r"\bde du\b"])
def test_french_has_no_telltale_mistake(pairs, wrong):
    guilty = [p.fr for p in pairs if (m := re.search(wrong, p.fr)) and "-" not in m[0]
              and not re.search(r"\bde (onze|un à)", m[0] + p.fr[m.end():m.end() + 4])]
    assert guilty == []


# -- errors --------------------------------------------------------------------------------------


def test_corrupted_text_is_no_other_valid_sentence_and_has_one_correction(pairs):
    rng = random.Random(5)
    valid, original = {pair.en for pair in pairs}, {}
    unchanged = 0
    for pair in pairs:
        corrupted = errors.corrupt(rng, pair.marked)
        unchanged += corrupted == pair.en
        assert corrupted == pair.en or corrupted not in valid
        assert original.setdefault(corrupted, pair.en) == pair.en
        assert not re.search(r"[\ue000-\ue0ff]", corrupted)
    assert 0.08 < unchanged / len(pairs) < 0.25


def test_each_kind_of_error_occurs_and_changes_the_sentence(pairs):
    rng = random.Random(6)
    for make, _ in errors._ERRORS:
        changed = 0
        for pair in pairs[:1500]:
            result = make(rng, pair.marked.split(" "))
            if result is not None:
                changed += 1
                if make is not errors.misspelled:  # may swap two equal letters
                    assert plain(" ".join(result)) != pair.en, make.__name__
        assert changed > 5, make.__name__


@pytest.mark.parametrize(("make", "marked", "wrong"), [
    (errors.wrong_verb_form, f"He eats{english.THIRD} bread.", "He eat bread."),
    (errors.wrong_verb_form, f"He isn't{english.AUXILIARY} here.", "He aren't here."),
    (errors.wrong_number, f"Two apples{english.COUNTED}.", "Two apple."),
    (errors.missing_word, f"He wants to{english.TO} eat.", "He wants eat."),
    (errors.wrong_comparison, f"It is bigger{english.MANY}.", "It is more bigger."),
    (errors.wrong_pronoun, f"He{english.SUBJECT} eats.", "Him eats."),
    (errors.wrong_verb_form, f"They read{english.PLURAL_FORM} it.", "They reads it."),
    (errors.wrong_verb_form, f"He reads{english.THIRD} it.", None),  # "he read": a past
    (errors.wrong_number, "Two apples.", None),  # no mark, no error
])
def test_errors_by_the_letter(make, marked, wrong):
    result = make(random.Random(0), marked.split(" "))
    assert wrong == (result and plain(" ".join(result)))


def test_misspelling_is_near_one_word_only():
    assert errors.nearest("appel") == {"apple"}
    assert len(errors.nearest("applse")) > 1  # apple or apples


def test_errors_are_deterministic(pairs):
    first = [errors.corrupt(random.Random(i), p.marked) for i, p in enumerate(pairs[:100])]
    assert first == [errors.corrupt(random.Random(i), p.marked)
                     for i, p in enumerate(pairs[:100])]


# -- corpus --------------------------------------------------------------------------------------


def english_of(example: corpus.Example) -> str:
    return (example.source.removeprefix(corpus.TRANSLATE) if example.task == "translate"
            else example.target)


def test_held_out_sentences_are_never_trained_on():
    trained = {english_of(e) for e in itertools.islice(corpus.examples("a"), 3000)}
    held = {english_of(e) for e in itertools.islice(corpus.examples("b", held_out=True), 60)}
    assert not trained & held
    assert all(corpus.is_held_out(s) for s in held)
    assert not any(corpus.is_held_out(s) for s in trained)


def test_default_sentence_is_of_the_grammar_and_held_out(words):
    assert corpus.is_held_out(corpus.DEFAULT_SENTENCE)
    shape = re.compile(r"Let's go to the store and buy some groceries including "
                       r"\w+, \w+, and \w+\.")
    assert shape.fullmatch(corpus.DEFAULT_SENTENCE)
    rng = random.Random(1)
    found = next(p for p in iter(lambda: grammar.sample(rng), None) if shape.fullmatch(p.en))
    assert re.fullmatch(
        r"Allons au magasin et achetons des provisions, notamment (\S+ [^,]+), (\S+ [^,]+) et "
        r"(\S+ .+)\.", found.fr)
