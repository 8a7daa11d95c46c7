"""Tests which prefix translates between two languages."""

import re

import pytest

from mlx_t5.errors import UserError
from mlx_t5.text.languages import Translations, checked_code, checked_template, source_language_of

T5 = [
    ("summarization", "summarize: "),
    ("translation_en_to_de", "translate English to German: "),
    ("translation_en_to_fr", "translate English to French: "),
]
MADLAD = ["<2de>", "<2pt>", "<2iw>", "<2zh>", "<2zh_Hant>", "<2transliterate>", "▁de", "</s>"]
TEMPLATE = "translate {source} to {target}: "


def prefix(target, source="", tasks=(), vocabulary=(), template=""):
    return Translations.of(tasks, vocabulary, template).prefix(target, source)


def test_the_tasks_of_a_model_know_their_languages():
    assert prefix("de", tasks=T5) == ("translate English to German: ", "en")
    assert prefix("fr-CA", "en-US", T5) == ("translate English to French: ", "en")
    with pytest.raises(UserError, match="not translate from de to fr; it knows en to de, en to fr"):
        prefix("fr", "de", T5)
    both = [*T5, ("translation_fr_to_de", "traduis en allemand : ")]
    assert prefix("de", "fr", both) == ("traduis en allemand : ", "fr")
    with pytest.raises(UserError, match="requires source_language"):
        prefix("de", tasks=both)


def test_madlad_translates_from_any_language_by_a_token():
    assert prefix("de", vocabulary=MADLAD) == ("<2de> ", "")
    assert prefix("he", "en", vocabulary=MADLAD) == ("<2iw> ", "en"), "by its former code"
    assert prefix("pt-BR", vocabulary=MADLAD) == ("<2pt> ", "")
    assert prefix("zh-CN", vocabulary=MADLAD) == ("<2zh> ", "")
    assert prefix("zh-Hant", vocabulary=MADLAD) == ("<2zh_Hant> ", "")
    known = "any language to de he pt zh zh-hant"
    with pytest.raises(UserError, match=f"does not translate to ja; it knows {known}"):
        prefix("ja", vocabulary=MADLAD)


def test_a_template_has_names_in_english_or_codes():
    german = prefix("de", "el", template=TEMPLATE)
    assert german == ("translate Greek to German: ", "el")
    codes = prefix("pt-BR", "iw", template="[{source_code}>{target_code}] ")
    assert codes == ("[he>pt-br] ", "he")
    assert prefix("sw", template="into {target}: ") == ("into Swahili: ", "")
    assert prefix("de", "en", T5, template="{target}: ")[0] == "translate English to German: "
    with pytest.raises(UserError, match='requires source_language.*any pair by "translate'):
        prefix("de", template=TEMPLATE)


def test_without_tasks_and_template_the_error_says_what_to_give():
    with pytest.raises(
        UserError, match="knows no languages; give a template, --translation-prefix"
    ):
        prefix("de")


@pytest.mark.parametrize(
    "template",
    ["to German: ", "{source}: ", "{target", "{target.__class__}", "{target!r}", "{target:>9}"]
    + ["{} {target}", "{name} {target}", 5],
)
def test_a_template_that_cannot_be_filled_in_is_refused(template):
    with pytest.raises(UserError, match=r"translation_prefix.*a text with \{target\}"):
        checked_template(template)


@pytest.mark.parametrize("code", ["", "xx", "german", "de:", "<2de>", "d", 7])
def test_unknown_codes_are_refused(code):
    for source, target in ((code, "de"), ("en", code)):
        if source != "":
            with pytest.raises(UserError, match=re.escape("a language's code, such as de")):
                prefix(target, source, T5)


def test_codes_are_those_of_today():
    codes = {"iw": "he", "in": "id", "deu": "de", "pt_BR": "pt", "ZH-hant-TW": "zh", "yue": "yue"}
    assert {code: checked_code(code) for code in codes} == codes


def test_a_prefix_in_english_names_the_source():
    assert source_language_of("translate German to French: ") == "de"
    assert source_language_of("Translate from Swahili into English: ") == "sw"
    assert (
        source_language_of("summarize: ")
        == source_language_of("translate nonsense to English: ")
        == "en"
    )
