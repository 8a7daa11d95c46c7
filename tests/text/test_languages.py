"""Tests which prefix translates between two languages."""

import random
import re

import pytest

from mlx_t5.errors import UserError
from mlx_t5.text.languages import (
    Translations,
    checked_code,
    checked_template,
    name_of,
    source_language_of,
)
from tests.support import madlad

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
    assert prefix("iw", vocabulary=["<2he>"]) == ("<2he> ", "")
    assert prefix("pt-BR", vocabulary=MADLAD) == ("<2pt> ", "")
    assert prefix("zh-CN", vocabulary=MADLAD) == ("<2zh> ", "")
    assert prefix("zh-Hant", vocabulary=MADLAD) == ("<2zh_Hant> ", "")
    known = "any language to de iw pt zh zh-Hant"
    with pytest.raises(UserError, match=f"does not translate to ja; it knows {known}"):
        prefix("ja", vocabulary=MADLAD)


@pytest.mark.parametrize("seed", range(3))
def test_madlads_tags_are_found_by_their_own_codes_in_any_order(seed):
    tokens = random.Random(seed).sample(madlad.TOKENS, len(madlad.TOKENS))
    translations = Translations.of((), tokens)
    other = {"CA", "IR", "NL", "RU", "ZW", "back_translated", "en_xx_simple", "mass", "translate"}
    other |= {"transliterate", "zxx_xx_dtynoise"}
    codes = [tag for tag in madlad.TAGS if tag not in other and not re.fullmatch("[A-Z].{3}", tag)]
    assert len(madlad.TOKENS) == 493 and len(codes) == 452
    assert {code: translations.prefix(code)[0] for code in codes} == {
        code: f"<2{code}> " for code in codes
    }
    pairs = translations.pairs()
    bcp47 = sorted(code.replace("_", "-") for code in codes)
    assert [code for code, _, _ in pairs] == pairs[0][2] == bcp47
    assert all(name and translations.prefix("de", code)[0] == "<2de> " for code, name, _ in pairs)
    assert len({name for _, name, _ in pairs}) == len(pairs), "and names tell them apart"


@pytest.mark.parametrize(
    "code, tag",
    [
        *[("zh-TW", "zh_Hant"), ("zh_hk", "zh_Hant"), ("zh-CN", "zh"), ("zh-Hans", "zh")],
        *[("in-ID", "id"), ("tl", "fil"), ("iw", "he"), ("de-CH-1996", "de")],
        *[("nb", "no"), ("nb-NO", "no"), ("nn-NO", "nn"), ("sr-Latn", "sh"), ("fa-AF", "prs")],
        *[("ms-BN", "ms"), ("ms-Arab-MY", "ms_Arab"), ("hi-Latn-IN", "hi_Latn")],
    ],
)
def test_a_code_finds_the_nearest_tag(code, tag):
    assert prefix(code, vocabulary=madlad.TOKENS)[0] == f"<2{tag}> "


def test_a_tag_with_a_script_or_region_is_one_that_the_code_implies():
    tags = ["<2zh_CN>", "<2zh_TW>", "<2sr_Latn>", "<2pt_BR>"]
    for code, tag in ("zh", "zh_CN"), ("zh-Hant", "zh_TW"), ("sh", "sr_Latn"), ("pt", "pt_BR"):
        assert prefix(code, vocabulary=tags)[0] == f"<2{tag}> "
    for code in "he", "iw", "sh", "sr-Latn":
        tag = f"<2{code.replace('-', '_')}>"
        assert prefix(code, vocabulary=["<2he>", "<2iw>", "<2sr_Latn>", "<2sh>"])[0] == tag + " "
    for code in "sr", "pt-PT", "en":
        with pytest.raises(UserError, match=f"not translate to {code}; it knows any language to "):
            prefix(code, vocabulary=tags)
    with pytest.raises(UserError, match="to nl; it knows any language to de$"):
        prefix("nl", vocabulary=["<2NL>", "<2Latn>", "<2de>", "<2xx>"])
    with pytest.raises(UserError, match="to ht"):  # some versions of CLDR have fr_HT as its parent
        prefix("ht", vocabulary=["<2fr>"])


def test_tasks_are_found_as_tags_are():
    tasks = [("translation_en_to_no", "to Norwegian: "), ("translation_iw_to_en", "from Hebrew: ")]
    assert prefix("nb", tasks=tasks) == ("to Norwegian: ", "en")
    assert prefix("en-GB", "he-IL", tasks) == ("from Hebrew: ", "iw")


def test_languages_have_names():
    names = {"pt-BR": "Brazilian Portuguese", "sr-Latn": "Serbian (Latin)", "dwr": "dwr"}
    names |= {"ms-Arab-BN": "Malay (Arabic, Brunei)", "iw": "Hebrew", "prs": "Dari"}
    assert {code: name_of(code) for code in names} == names


def test_pairs_list_mere_targets_too():
    pairs = Translations.of(T5, ["<2>", "</s>"]).pairs()
    assert pairs == [("de", "German", []), ("en", "English", ["de", "fr"]), ("fr", "French", [])]
    assert Translations.of((), ["<2fr>"]).pairs() == [("fr", "French", ["fr"])], "without <2de>"
    anything = Translations.of((), (), TEMPLATE).pairs()
    assert anything[0][:2] == ("aa", "Afar") and len(anything) == len(anything[0][2])


def test_a_template_has_names_in_english_or_codes():
    german = prefix("de", "el", template=TEMPLATE)
    assert german == ("translate Greek to German: ", "el")
    codes = prefix("pt-BR", "iw", template="[{source_code}>{target_code}] ")
    assert codes == ("[he>pt-BR] ", "he")
    scripts = prefix("zh_hant_TW", "zh-Hans", template=TEMPLATE + "{source_code}>{target_code}")
    named = "translate Simplified Chinese to Traditional Chinese (Taiwan): zh-Hans>zh-Hant-TW"
    assert scripts == (named, "zh")
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


@pytest.mark.parametrize("code", ["", "xx", "german", "de:", "<2de>", "d", "de-" + "x" * 99, 7])
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
