"""Tests files with markup from end to end, as documents and on the command line."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_letters

import pytest

import markup_files
from command_line import ROOT
from markup_files import NEWLINES, WHOLE, generated
from mlx_t5.settings import SPLITS
from mlx_t5.text.documents import Cutting, Document
from mlx_t5.text.markup import LINE_CHARACTERS

PAIR = ("--model", str(ROOT / "demo/target"), "--draft-model", str(ROOT / "demo/draft"))
PREFIX = "translate English to French: "


def document(text: str, suffix: str, split: str, limit: int | None = None) -> Document:
    cutting = Cutting(split, "", max_source_tokens=limit, file_type=suffix)
    return Document(text, cutting, lambda prompt: len(prompt.split()))


def joined(file: Document, answer: Callable[[str], str | None]) -> str:
    return markup_files.joined(file, [answer(file.source(piece)) for piece in file.cut()])


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("suffix", WHOLE)
def test_unanswered_files_come_back_with_any_split(suffix, split):
    texts = [generated(suffix, seed) for seed in range(100)]
    texts += [WHOLE[suffix].replace("\n", newline) for newline in NEWLINES]
    for text in texts:
        for limit in (None, 2):
            assert joined(document(text, suffix, split, limit), str) == text
        assert joined(document(text, suffix, split), lambda source: None) == text  # all pieces fail


SWAPPED = {ord(a): b for a, b in zip(ascii_letters, ascii_letters.swapcase(), strict=True)}
TYPESET = dict.fromkeys(map(ord, " \t\r\n>"))  # characters that break lines


@pytest.mark.parametrize("suffix", WHOLE)
def test_markup_stays_when_every_word_is_changed(suffix):
    for seed in range(100):
        text = generated(suffix, seed)
        changed = joined(
            document(text, suffix, "sentences"), lambda source: source.translate(SWAPPED)
        )
        assert text.translate(TYPESET).lower() == changed.translate(TYPESET).lower()


@pytest.mark.parametrize("limit", [None, 3])
def test_the_marks_of_a_quote_are_not_decoded(limit):
    text = "> He left, and she,\n> then, stayed.\n> > No one came. So it\n> > ended.\n"
    quote = document(text, ".md", "sentences", limit)
    sources = [quote.source(piece) for piece in quote.cut()]
    assert " ".join(sources) == "He left, and she, then, stayed. No one came. So it ended."
    assert (limit is None) == (len(sources) == 3)


CUE = "1\r\n00:00:01,000 --> 00:00:02,000\r\n{}\r\n\r\n"


def test_sentences_of_a_cue_are_broken_into_lines_together():
    text = CUE.format("I know. You have been\r\nhere before.")
    answers = {"I know.": "Je le sais bien.", "You have been here before.": "Tu es déjà venu ici."}
    whole = joined(document(text, ".srt", "sentences"), answers.get)
    assert whole == CUE.format("Je le sais bien. Tu\r\nes déjà venu ici.")
    answers["I know."] = None
    failed = joined(document(text, ".srt", "sentences"), answers.get)
    assert failed == CUE.format("I know. Tu es\r\ndéjà venu ici.")


def test_long_answers_to_a_cue_have_more_lines():
    text = CUE.format("One two. Three four five.\r\nSix seven. Eight.") * 3
    subtitles = document(text, ".srt", "sentences")
    longer = joined(subtitles, lambda source: source + " " + source)
    assert longer != text and max(map(len, longer.splitlines())) <= LINE_CHARACTERS
    assert longer.count("\r\n") == text.count("\r\n") + 3


FILES = {
    "talk.SRT": (
        "\ufeff1\r\n00:00:01,000 --> 00:00:03,000\r\n<i>I have two cats. They\r\nare in the garden."
        "</i>\r\n\r\n2\r\n00:00:04,000 --> 00:00:06,000\r\n- I have a dog.\r\n- She has a cat.\r\n"
    ),
    "page.md": "# I have two cats.\n\n- I have two cats. They are\n  in `here`.\n\n```\nI.\n```\n",
}


@pytest.mark.parametrize("name", FILES)
def test_the_command_line_translates_a_file_and_keeps_its_markup(run, tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name].encode())
    files = ["--input-file", str(tmp_path / name), "--output-file", str(tmp_path / "out")]
    status, out, _ = run(
        *PAIR, "--dtype", "float32", "--prefix", PREFIX, "--split=sentences", *files
    )
    text = (tmp_path / "out").read_bytes().decode()
    assert status == 0 and not out and "J'ai deux chats." in text
    assert text.count("\n") == FILES[name].count("\n") == text.count("\r\n") or name == "page.md"
    parts = {
        "talk.SRT": ("\ufeff1\r\n00:00:01,000 --> 00:00:03,000\r\n<i>J'ai deux chats.", "\r\n- "),
        "page.md": ("# I have two cats.\n\n- J'ai deux chats.", "`here`.\n\n```\nI.\n```\n"),
    }
    assert all(part in text for part in parts[name])
