"""Tests documents: the decoded pieces, the text that stays, and answers in their places."""

import random
import re
import sys
import unicodedata

import pytest

from mlx_t5.errors import UserError
from mlx_t5.settings import SPLITS, UNREADABLE
from mlx_t5.text.documents import LONGEST_SENTENCE, Document, DocumentOptions

PREFIXES = (
    "summarize: ", "translate English to German: ", "translate ", "Fix this text: ", "校正：",
    "translate German to English: ", "Translate from German into English: ",
)  # fmt: skip


def words(prompt: str) -> int:
    return len(prompt.split()) + 1


def document_of(text: str, split: str = "sentences", limit=None, tokens=words, **how):
    return Document(text, DocumentOptions(split, **how), tokens, limit, PREFIXES)


def sources(text: str, split: str = "sentences", **how) -> list[str]:
    document = document_of(text, split, **how)
    return [document.source(piece) for piece in document.cut()]


def joined(document: Document, answers: list[str | None]) -> str:
    """Returns the document with answers in place of its pieces; None: the piece failed."""
    texts = [document.answered(*pair) for pair in zip(document.pieces, answers, strict=True)]
    parts = [document.part(i, texts) for i in range(len(texts))]
    return "".join([*parts, document.before(len(texts))])


# ---- nothing is lost -----------------------------------------------------------------------------

SENTENCES = [
    "Dr. Smith paid $3.50 on Jan. 5th.", "“Is it true?” she asked.", "e.g. this", "x" * 90,
    "Das kostet z. B. 3,50 Euro.", "« Vraiment ? » demanda-t-elle.", "¿Qué dices?",
    "他来了。价格是3.50元！", "彼は来た。「本当？」", "هل هذا صحيح؟ نعم، هذا صحيح.", "वह आया। क्या?",
    "그는 왔다.", "It goes on and on over a line of many words that is as long as any,",
    "***", "—", "…", "42", "🙂 ok", "e\u0301te\u0301", "a\tb", "- item", "12. item", "Note: this",
    "don&#39;t", "R&amp;D<br/>&nbsp;", "&quot;So?&quot; &hellip;", "\nAnna: Oh.", "https://a.io/?b&lt;c",
]  # fmt: skip
BETWEEN = ["", " ", "  ", "\n", "\r\n", "\r", "\n\n", "\r\n \r\n", "\t", "\u00a0", "\u2003", "\v"]


def texts(count: int, sentences=SENTENCES):
    draw = random.Random(0)
    for _ in range(count):
        parts = (draw.choice(BETWEEN) + draw.choice(sentences) for _ in range(draw.randrange(9)))
        yield draw.choice(["", "\ufeff"]) + "".join(parts) + draw.choice(BETWEEN)


@pytest.mark.parametrize("split", SPLITS)
def test_pieces_answered_with_themselves_give_back_the_text(split):
    for n, text in enumerate(texts(1000)):
        limit = [None, 4, 2][n % 3]
        document = document_of(text, split, limit, tokens=words if n % 2 else len, prefix="")
        pieces = list(document.cut())
        assert joined(document, [document.source(piece) for piece in pieces]) == text
        assert joined(document, [None] * len(pieces)) == text
        ends = [0, *(at for piece in pieces for at in (piece.start, piece.end)), len(text)]
        assert ends == sorted(ends), "in order, and none in another"
        for i, piece in enumerate(pieces):
            source = document.source(piece)
            assert source == source.strip() and any(map(str.isalpha, source))
            between = document.before(i) + document.before(len(pieces))
            marks = re.sub("item|&nbsp;|<br/>|&hellip;|&quot;|Anna:", "", between)
            assert not any(unicodedata.category(char)[0] == "L" for char in marks), text


def test_answers_replace_their_pieces_in_place():
    text = "<2de>  One.  Two!\r\n\r\n\t- Three?\n***\nFour\n"
    document = document_of(text)
    assert [document.prompt(piece) for piece in document.cut()] == [
        "<2de>  One.", "<2de>  Two!", "<2de>  Three?", "<2de>  Four"
    ]  # fmt: skip
    assert joined(document, ["1", None, "", "4\n"]) == "1  Two!\r\n\r\n\t- \n***\n4\n\n"
    assert [document.before(i) for i in range(5)] == ["", "  ", "\r\n\r\n\t- ", "\n***\n", "\n"]


def test_a_document_is_cut_only_as_far_as_requested():
    texts = []
    document = document_of("One. " * 100_000, tokens=lambda text: texts.append(text) or 1, limit=9)
    cut = document.cut()
    assert [next(cut).start for _ in range(3)] == [0, 5, 10]
    assert len(document.pieces) == 3 and len(texts) == 4, "of the prefix as well"


# ---- the prefix, and the language that it names --------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    ["translate English to German: ", "<2pt> ", "Fix this text:\n\n", "\n summarize: ", "校正："],
)
def test_a_prefix_of_the_model_goes_before_every_piece(prefix):
    for mark in "", "\ufeff":
        document = document_of(f"{mark}{prefix}One. Two.\n")
        prompts = [document.prompt(piece) for piece in document.cut()]
        assert prompts == [prefix + "One.", prefix + "Two."]
        assert joined(document, ["1.", "2."]) == "1. 2.\n"


@pytest.mark.parametrize(
    "text, doubtful",
    [("title: My page.", "title:"), ("- eggs: I have two cats.", "- eggs:"),
     ('"he said: I come. She left."', '"he said:'), ("Summarize: One.", "Summarize:"),
     ("Note: this.", ""), ("校正: One.", "校正:"), ("One. <2de> Two.", ""), ("summarize:One.", "")],
)  # fmt: skip
def test_a_possible_prefix_is_kept_as_text(text, doubtful):
    for options, unsure in ({}, doubtful), ({"prefix": ""}, ""), ({"file_type": ".txt"}, ""):
        document = document_of(text, **options)
        pieces = list(document.cut())
        assert (document.prefix, document.start, document.doubtful) == ("", 0, unsure)
        assert joined(document, [None] * len(pieces)) == text
        shown = "".join(document.prompt(piece) for piece in pieces).replace(" ", "")
        assert shown == text.removeprefix("- ").replace(" ", "")


def test_no_prefix_is_searched_if_one_is_given():
    text = "summarize: One. Two."
    assert sources(text) == ["One.", "Two."]
    for prefix in "", "shorten: ":
        document = document_of(text, prefix=prefix)
        first = next(document.cut())
        assert document.prompt(first) == prefix + "summarize: One."
    assert sources(text, file_type=".txt") == ["summarize: One.", "Two."], "a file's words"


GERMAN = "Das kostet z. B. 3,50 Euro, bzw. Abs. 2 gilt. Am 5. Mai kam sie an."


def test_the_language_decides_which_dots_are_abbreviations():
    expected = ["Das kostet z. B. 3,50 Euro, bzw. Abs. 2 gilt.", "Am 5. Mai kam sie an."]
    assert sources(GERMAN, source_language="de") == expected
    assert sources("translate German to English: " + GERMAN) == expected
    assert sources("Translate from German into English: " + GERMAN) == expected
    for text in (GERMAN, "translate English to German: " + GERMAN, "<2en> " + GERMAN):
        assert len(sources(text)) > 2
    assert sources(GERMAN, source_language="de_AT") == expected


@pytest.mark.parametrize("space", ["\u202f", "\u2028", "\x85", " "])
def test_white_space_of_several_bytes_after_a_capital_is_kept(space):
    text = f"Plan B{space}. It is good.{space}Plan B{space}. So is it."
    document = document_of(text)
    sentences = [document.source(piece) for piece in document.cut()]
    assert sentences == [f"Plan B{space}.", "It is good.", f"Plan B{space}.", "So is it."]
    assert joined(document, sentences) == text


class PanicException(BaseException):
    """Looks like the exception of a Rust panic in Python."""


@pytest.mark.parametrize("error", [PanicException("byte 8"), ValueError("x")])
def test_a_paragraph_on_which_sentencex_fails_is_one_sentence(monkeypatch, capsys, error):
    def failing(language, text):
        raise error

    monkeypatch.setattr("sentencex.get_sentence_boundaries", failing)
    assert sources("Plan B. It is good.") == ["Plan B. It is good."]
    assert "a paragraph is taken as one sentence\n" in capsys.readouterr().err
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        sources("B")


# Where a sentence ends, "|" stands.
SENTENCES_OF = {
    "cs": [
        "Hrál v 1. FC Slovácko. | Vyhrál.", "Viz čl. II smlouvy. | Platí.",
        "Ne. | J. Novák odešel.", "Přišel 5. května. | Odešel.", "5. května přišel. | Odešel.",
        "Bylo jich 5. | Odešli.",
    ],
    "de": [
        "Anfang 19. Jahrhundert war das neu. | Heute nicht.", "Er kam am 5. Mai an. | Sie ging.",
        "Er kam 15. Jan. 2020 an. | Sie ging.", "Der 3. Mann sang inkl. Zugabe. | Gut.",
        "Er schrieb an Hrn. Roth. | Sie las.", "Er hat 3. | Sie hat 5.",
    ],
    "en": [
        "See vol. II of it. | Read.", "It takes approx. 5 hours. | Wait.", "He sat. | J. Roe came.",
        "Mgr. Roe paid $3.50. | He left.", "He has 5. | Then he left.", "he has 5. | then he left.",
    ],
    "es": [
        "La Dña. María comió. | Ya.", "Los Sres. y las Sras. Gil salieron. | No volvieron.",
        "Son 5 km aprox. desde aquí. | Vamos.", "Son 5 km aprox. | Vamos.",
        "El Rvdo. Gil habló. | Todos oyeron.", "Vino el 5 feb. 2020. | Se fue.",
    ],
    "fr": [
        "M. Roux est là. | Il rit.", "Mme. Curie et le Dr. Knock parlent. | Mlle. Rose écoute.",
        "Il boit. | M. et Mme. Roux dorment.", "Venez le 5 févr. 2020. | Merci.",
        "C'était en 52 av. J.-C. à Rome. | C'est vieux.", "C'était en 52 av. J.-C. | C'est vieux.",
    ],
    "hu": [
        "Május 5. napján jött. | Elment.", "A 19. század elején élt. | Meghalt.",
        "Itt élt II. Rákóczi Ferenc. | Ott nem.", "Jött özv. Nagy Anna. | Leült.",
        "Született 1990. május 5. napján. | Él.", "Vett almát stb. | Jó volt.",
    ],
    "it": [
        "Vedi pag. 5 del libro. | Leggi.", "Il n. 7 vince. | Bravo.", "Ecco. | M. Rossi venne.",
        "La Fiat S.p.A. produce auto. | Vende.", "Lavora alla Fiat S.p.A. | Vende.",
        "Nacque nel 44 a.C. a Roma. | Morì.",
    ],
    "nl": [
        "Mevr. Jansen kwam. | Zij at.", "Ds. De Vries sprak. | Men luisterde.",
        "Het was o.a. Piet. | Hij lachte.", "Hij kwam 5 feb. 2020 aan. | Hij bleef.",
        "Hier woont jhr. Van Rijn. | Mooi.", "Hij at soep. | Zij dronk.",
    ],
    "no": [
        "Den 5. mai kom han. | Han ble.", "I det 19. århundre var det nytt. | Nå ikke.",
        "I 3. klasse var han glad. | Nå ikke.", "Han har 3. | Hun har 5.",
        "Han bor i 2. etasje. | Hun ikke.", "Harald IV. | Han er konge.",
    ],
    "pl": [
        "W 19. wieku żył tu. | Umarł.", "Spotkał dr. Nowaka i ks. Kowala. | Mówili.",
        "Mieszka na pl. Zamkowym. | Lubi go.", "Było to w 1990 r. w Łodzi. | Padało.",
        "Było to w 1990 r. | Padało.", "To był Jan Paweł II. | Był tu.",
    ],
    "pt": [
        "A Srta. Ana chegou. | Comeu.", "Mora na av. Paulista. | Gosta.",
        "Foi no séc. XX em Lisboa. | Acabou.", "Veja a pág. 5 do livro. | Leia.",
        "Há peras, etc. no cesto. | Coma.", "Há peras, etc. | Coma.",
    ],
    "tr": [
        "19. yüzyılda yaşadı. | Öldü.", "Sonra 2. Dünya Savaşı bitti. | Barış geldi.",
        "II. Murat tahta çıktı. | Yıl 1421.", "Doç. Dr. Ali geldi. | Oturdu.",
        "Hz. Muhammed doğdu. | Yıl 571.", "Ankara'da yaşıyor. | Mutlu.",
    ],
}  # fmt: skip


@pytest.mark.parametrize("language", SENTENCES_OF)
def test_no_sentence_ends_at_an_abbreviation_or_an_ordinal(language):
    assert len(SENTENCES_OF[language]) == 6
    for case in SENTENCES_OF[language]:
        found = sources(case.replace(" | ", " "), source_language=language, prefix="")
        assert found == case.split(" | ")


def test_in_any_language_nothing_is_lost():
    languages = (
        "af ar az be bg bn bs ca cs cy da de el en es et eu fa fi fr ga gl he hi hr hu hy id is it"
        " ja ka kk km ko lt lv mk ms my nb nl pl pt ro ru sk sl sr sv ta th tr zh"
    ).split()
    assert len(languages) == 54
    abbreviated = [text.replace(" | ", "  ") for cases in SENTENCES_OF.values() for text in cases]
    for language in languages:
        for text in texts(60, SENTENCES + abbreviated):
            document = document_of(text, source_language=language, prefix="")
            pieces = list(document.cut())
            assert joined(document, [document.source(piece) for piece in pieces]) == text


# ---- lines ---------------------------------------------------------------------------------------

WRAPPED = """It was the best of times, it was the worst of times, it was the
age of wisdom, it was the age of foolishness. It was the epoch of
belief, said Dr.
Manette.
"""


def test_hard_wrapped_prose_is_read_over_the_ends_of_lines():
    sentences = sources(WRAPPED.replace("\nManette", " Manette").replace("\n", "\r\n"))
    assert sentences[0].endswith("it was the age of wisdom, it was the age of foolishness.")
    assert sentences[1:] == ["It was the epoch of belief, said Dr. Manette."]


def test_an_answer_over_several_lines_is_broken_again():
    text = "\n".join(WRAPPED.split("\n")[:2])
    document = document_of(text)
    first = next(document.cut())
    answer = (
        "C'était le meilleur des temps, c'était le pire des temps, c'était l'âge de la sagesse."
    )
    assert document.answered(first, answer).split() == answer.split()
    assert document.answered(first, answer).count("\n") == 1


@pytest.mark.parametrize(
    "text, count",
    [
        ("Chapter One\nin which it begins", 2),  # short
        ("A heading of more than forty characters here\nIt begins with a capital.", 2),
        ("one paragraph a line, and this one is long " * 3 + "\nand another one", 2),
        ("- one item of a list that is longer than forty\n- and another\n3) third", 3),
        ("lines that are as long as most lines are in files\nbut\nthen another short one", 3),
        ("- one item of a list that is longer than forty ch\n  aracters, in two lines", 1),
        ("first lines that are long enough for hard-wrapped\n\nprose, but with an empty one", 2),
    ],
)
def test_lines_of_other_kinds_are_separate_pieces(text, count):
    assert len(sources(text)) == count


def test_the_mark_of_a_list_item_is_no_part_of_it():
    assert sources("1. One\n2) Two\n * Three\n• Four\n-5 degrees\n1990. Five") == [
        "One", "Two", "Three", "Four", "-5 degrees", "Five"
    ]  # fmt: skip
    text = "5. mája\n- jablko\n2. Jablko"
    assert sources(text, source_language="sk") == ["5. mája", "jablko", "Jablko"]
    assert sources("1. Elma", source_language="tr") == ["Elma"]
    assert sources("1. poma", source_language="ca") == ["poma"], "no language of such ordinals"


def test_a_document_can_be_split_into_lines():
    text = " One. Two.\r\n\n\tthree\r- four\n..."
    assert sources(text, "lines") == ["One. Two.", "three", "- four"]
    assert " ".join(sources(text, "none")[0].split()) == "One. Two. three - four ..."


# ---- sentences that are too long -----------------------------------------------------------------


def cut(text: str, limit: int, tokens=words, split="sentences") -> list[str]:
    document = document_of(text, split, limit, tokens=tokens, prefix="")
    pieces = list(document.cut())
    assert all(piece.cut for piece in pieces) == (tokens(text) > limit)
    assert all(tokens(document.prompt(piece)) <= limit for piece in pieces)
    return [document.source(piece) for piece in pieces]


@pytest.mark.parametrize("split", SPLITS)
def test_long_sentences_are_cut_at_commas_and_then_at_words(split):
    assert cut("a b c, d e f", 7, split=split) == ["a b c, d e f"]
    assert cut("a b c, d e f", 6, split=split) == ["a b c,", "d e f"]
    assert cut("a b c, d e f", 3, split=split) == ["a", "b c,", "d", "e f"]
    assert cut("aa 1,000; bb 2,000", 3, split=split) == ["aa 1,000;", "bb 2,000"]
    comma = "However, I have two cats and one dog, really"
    assert cut(comma, 9, split=split) == ["However, I have two", "cats and one dog, really"]
    assert cut("it is " + "x" * 40, 40, len, split)[0] == "it is", "and no word is cut first"


def test_text_without_spaces_is_cut_too():
    assert cut("他来了，价格是高的", 6, len) == ["他来了，", "价格是高的"]
    assert cut("好，" + "价格是高的" * 2, 7, len) == ["好，价格是高", "的价格是高的"], (
        "in the middle"
    )
    assert cut("A 是高的好人是高的好人 B", 9, len) == ["A 是高的好人", "是高的好人 B"]
    assert cut("ฉันไปตลาดเช้า", 9, len) == ["ฉันไปต", "ลาดเช้า"]
    assert cut("กกกกเกกกก", 8, len)[1][0] == "เ", "this vowel is read behind the next letter"
    assert sources("ab&#39;c&amp;d", limit=4, tokens=len) == ["ab'", "c&d"]
    assert cut("abcdefgh", 3, len) == ["ab", "cd", "ef", "gh"]
    accents = "e\u0301" * 4
    assert cut(accents, 4, len) == ["e\u0301" * 2] * 2
    assert all(unicodedata.category(part[0]) != "Mn" for part in cut(accents, 3, len))
    assert len(cut("a" + "\u0301" * 9_999, 100, len)) < 9  # cut in halves, not one accent at a time


def test_one_character_is_never_cut():
    document = document_of("ab", limit=2, tokens=lambda text: 1 if text == "a" else 9, prefix="")
    assert [document.source(piece) for piece in document.cut()] == ["a", "b"]


def test_a_prefix_without_room_for_text_is_refused():
    with pytest.raises(UserError, match="max_source_tokens is 3, but the prefix and one .* take 4"):
        document_of("<2de> text", max_source_tokens=3, tokens=lambda text: 2 * words(text) - 2)


def test_the_option_overrides_the_models_limit():
    assert len(sources("a b c d", limit=3)) == 2
    assert len(sources("a b c d", limit=3, max_source_tokens=9)) == 1


@pytest.mark.parametrize(
    "text", ["word " * 9_000, "x" * 45_000, '(«"' * 15_000 + "end.", "字" * 30_000]
)
def test_a_sentence_without_an_end_is_cut_in_windows(text):
    document = document_of(text, prefix="")
    pieces = list(document.cut())
    assert all(piece.cut for piece in pieces[:-1])
    assert max(piece.end - piece.start for piece in pieces) <= LONGEST_SENTENCE
    assert joined(document, [document.source(piece) for piece in pieces]) == text
    if "word" in text:
        assert {word for piece in pieces for word in document.source(piece).split()} == {"word"}


def test_sentences_are_whole_where_windows_meet():
    text = "".join(f"This is sentence number {i} of a long paragraph. " for i in range(900))
    assert len(text) > 4 * LONGEST_SENTENCE
    assert [source[-10:] for source in sources(text)] == ["paragraph."] * 900


# ---- names, references, addresses and numbers ----------------------------------------------------


def test_names_and_lines_without_a_letter_stay():
    text = "Anna: One. Two.\n\n- Anna: Three.\n*Ben: four*\nANNA: Five\n42 / 7\n\tAnna:Six\n"
    text += "[Anna] Seven\nAnna: 8 %\n王：九\n王： 十\n王：一 Anna: two"
    expected = ["One.", "Two.", "Three.", "*Ben: four*", "ANNA: Five", "Anna:Six", "[Anna] Seven"]
    expected += ["九", "十", "一 Anna: two"]
    assert sources(text) == expected
    assert sources(text, "lines") == ["One. Two.", *expected[2:]]


def test_references_are_characters_and_breaks_are_ends_of_lines():
    text = "Don&#39;t &amp; won&rsquo;t!<br/>&nbsp;Is it &lt;new&gt;&nbsp;? Oh &x1; yes &mdash; no."
    expected = ["Don't & won’t!", "Is it <new> ?", "Oh &x1; yes — no."]
    for file_type in "", ".txt":
        document = document_of(text, file_type=file_type)
        assert [document.source(piece) for piece in document.cut()] == expected
        answers = [expected[0], "Est-ce <nouveau> ?", "oui & non"]
        written = text.replace("Is it &lt;new&gt;&nbsp;?", "Est-ce <nouveau> ?")
        assert joined(document, answers) == written[: written.index("Oh")] + "oui & non"
    cue = "WEBVTT\n\n00:01.000 --> 00:02.000\n{}\n"
    document = document_of(cue.format("Is it &lt;new&gt; & old?"), file_type=".vtt")
    assert [document.source(piece) for piece in document.cut()] == ["Is it <new> & old?"]
    assert joined(document, ["a < 'b' & c > d"]) == cue.format("a &lt; 'b' &amp; c &gt; d")


@pytest.mark.parametrize(
    "address", ["https://a.io/b?c=1&d=%20#e", "www.a-b.co.uk/x_y", "a.b+c@d-e.io"]
)
def test_an_answer_without_the_address_of_its_source_is_told(address):
    document = document_of(f"See ({address}), or <{address}>.")
    (piece,) = document.cut()
    assert not document.loses_address(piece, f"Voir {address}.")
    for wrong in address.upper(), address[:-1], "Voir.":
        assert document.loses_address(piece, f"Voir {wrong}.")


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"split": "words"}, {"split": None}, {"source_language": "german"}, {"source_language": "xx"},
     {"source_language": 5},
     {"max_source_tokens": 0}, {"max_source_tokens": "many"}, {"file_type": "srt"},
     *({"file_type": suffix} for suffix in UNREADABLE)],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} is "):
        DocumentOptions(**wrong)


def test_token_ids_are_no_document():
    with pytest.raises(UserError, match="split is 'lines', which needs a text"):
        document_of([5, 6], "lines")


def test_a_missing_sentence_library_is_named_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    assert sources("One.\nTwo.", "lines") == ["One.", "Two."]
    with pytest.raises(UserError, match="needs sentencex; pip install -r requirements.txt"):
        sources("One. Two.")
