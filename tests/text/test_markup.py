"""Tests which text of a file is decoded, and how answers are broken into lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from markdown_it import MarkdownIt

from markup_files import NEWLINES, ODD_SPACES, ODD_TIMES, SRT, WHOLE, generated
from mlx_t5.errors import UserError
from mlx_t5.text.markup import LINE_CHARACTERS, SUFFIXES, Span, rewrapped, spans, unwrapped

ROOT = Path(__file__).resolve().parents[2]
GENERATED = 300  # number of files of each kind
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("demo/*.md")]
VTT = WHOLE[".vtt"]
PARSER = MarkdownIt("commonmark").enable("table")
MARKED = ("text", "softbreak", "em_open", "em_close", "strong_open", "strong_close")


def answered(text: str, suffix: str, answer: Callable[[str], str]) -> str:
    """Returns a file in which every span is replaced by its answer."""
    for start, end, wrapped in reversed(spans(text, suffix)):
        source = text[start:end]
        new = rewrapped(source, answer(unwrapped(source))) if wrapped else answer(source)
        text = text[:start] + new + text[end:]
    return text


def decoded(text: str, suffix: str) -> list[str]:
    """Returns the texts of a file that a model decodes."""
    return [unwrapped(text[a:b]) if wrapped else text[a:b] for a, b, wrapped in spans(text, suffix)]


def outline(text: str) -> list[tuple]:
    """Returns the markup of a Markdown text and its lines, as parsed."""
    return [
        (
            token.type,
            token.map,
            token.content if token.type in ("fence", "code_block", "html_block") else "",
            [
                (child.type, child.attrs, child.content if child.type != "text_special" else "")
                for child in token.children or []
                if child.type not in MARKED
            ],
        )
        for token in PARSER.parse(text)
    ]


def answers(text: str) -> str:
    """Returns the text with changed letters in words of the same length."""
    return text.swapcase()


def test_the_words_of_a_markdown_file_are_decoded():
    assert decoded(WHOLE[".md"], ".md") == [
        "One paragraph with", "a", "and **bold** that goes on over", "here and ends now.",
        "After a hard break", "and another one,", "and", "quoted text which goes on and lazily too",
        "deeper still", "item one goes on", "of things", "nested, see", "And", "or",
        "code in the item", "tab after the mark goes on", "a head", "b", "cell one", "two", "words",
        "short", "Text", "bold", "and", "done. 使用", "来做。", "A footnote text.", "Tail",
        "with [nothing] and an open ` mark.",
    ]  # fmt: skip


def test_the_words_of_subtitle_files_are_decoded():
    assert decoded(SRT, ".srt") == [
        "Hello there, my friend.", "Who is it?", "It is", "me", "Bob.", "la la", "is not",
        "for me.", "The end",
    ]  # fmt: skip
    assert decoded(VTT, ".vtt") == ["Hello", "you", "over there", "Hi", "you"]


def test_plain_text_is_one_span_after_its_byte_order_mark():
    assert spans("\ufeffOne.\nTwo.", ".txt") == [Span(1, 10, False)]
    assert spans("", ".txt") == spans("\ufeff", ".txt") == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("`list`s and `dict`s", ["and"]),
        ("un`fold`ed word", ["word"]),
        ("(`x`), then y", ["then y"]),
        ("Call `f`, “now”, with `x` (`y`).", ["Call", "“now”, with"]),
        ("H<sub>2</sub>O is <b>wet</b>", ["is", "wet"]),
        ("[^1]: See it[^2].", ["See it"]),
        ("\\*not emphasis\\* and R&amp;D", ["not emphasis", "and"]),
        ("fish &amp; chips", ["fish", "chips"]),
        ("www.a.b/c, d@e.fr: 12", []),
        ("[a] and [b](c", ["[a] and [b](c"]),
        ("> [!NOTE]\n> Mind the gap", ["Mind the gap"]),
        ("Title\n---\ntext", ["text"]),
        ("[ref]: /url\ntext", ["text"]),
        ("<!-- a\n\nb -->\ntext", ["text"]),
        ("<div>a\nb\n\ntext", ["text"]),
        ("---\na: b\n---\ntext", ["text"]),
        ("+++\na = 1\n+++\ntext", ["text"]),
        ("---\n\ntext\n\n---", ["text"]),
        ("1. one\n2. two\n   more", ["one", "two more"]),
        ("> a\n> b\n\nc\\\nd", ["a b", "c", "d"]),
    ],
)
def test_markup_of_markdown_is_not_decoded(text, expected):
    assert decoded(text, ".md") == expected
    assert decoded("\ufeff" + text.replace("\n", "\r\n"), ".md") == expected


@pytest.mark.parametrize(
    "cue, expected",
    [
        ("<i>Yes</i>", ["Yes"]),
        ("-Yes.\n-No.", ["Yes.", "No."]),
        ("<i>- Yes\nand no</i>\n– Oh", ["Yes and no", "Oh"]),
        (">> Yes\n&gt;&gt; No", ["Yes", "No"]),
        ("{\\an8}Up <i>there</i>, far", ["Up", "there", "far"]),
        ("I <3 you", ["I <3 you"]),
        ("R&amp;D and &lt;", ["and"]),
        ("12\n…", []),
        ("Vraiment ?\nOui !", ["Vraiment ? Oui !"]),
        ("A -> B -->\n5:00 -> six\n1:2 --> 3", ["A -> B --> 5:00 -> six 1:2 --> 3"]),
        ("At 00:00:05,000 --> no\n2:00:05.5 or 00:05.000 yes", ["At", "no", "or", "yes"]),
    ],
)
def test_markup_of_a_cue_is_not_decoded(cue, expected):
    assert decoded(f"1\n00:00:01,000 --> 00:00:02,000\n{cue}\n", ".srt") == expected


@pytest.mark.parametrize("times", ODD_TIMES)
@pytest.mark.parametrize("suffix", [".srt", ".vtt"])
def test_odd_times_stay_and_begin_a_cue(suffix, times):
    cues = [f"{number}\n{times.format(number, number + 1)}\n{{}}\n" for number in range(1, 5)]
    for gap in "\n", "" if suffix == ".srt" else "\n":
        text = "WEBVTT\n\n" * (suffix == ".vtt") + gap.join(cues)
        words = ["One.", "Two\nlines.", "Three.", "Four."]
        assert decoded(text.format(*words), suffix) == [word.replace("\n", " ") for word in words]
        changed = answered(text.format(*words), suffix, str.swapcase)
        assert changed == text.format(*map(str.swapcase, words))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_whose_answers_are_their_sources_come_back(suffix):
    for newline in NEWLINES:
        for text in (WHOLE[suffix], "\ufeff" + WHOLE[suffix], WHOLE[suffix].rstrip("\n")):
            text = text.replace("\n", newline)
            assert answered(text, suffix, str) == text
            assert decoded(text, suffix) == decoded(WHOLE[suffix], suffix) or suffix == ".txt"
    for seed in range(GENERATED):
        text = generated(suffix, seed)
        assert answered(text, suffix, str) == text


@pytest.mark.parametrize("suffix", [".md", ".srt", ".vtt"])
def test_spans_hold_words_and_are_in_order(suffix):
    for seed in range(GENERATED):
        text, at = generated(suffix, seed), 0
        for start, end, wrapped in spans(text, suffix):
            source = text[start:end]
            assert at <= start < end and source == source.strip()
            assert any(map(str.isalpha, source)) and (wrapped or not re.search("[\r\n]", source))
            at = end


def test_pages_keep_their_markup_with_other_words():
    assert len(PAGES) > 10
    for page in PAGES:
        text = page.read_bytes().decode()
        assert answered(text, ".md", str) == text
        changed = answered(text, ".md", answers)
        assert changed != text and outline(changed) == outline(text)


def test_subtitles_keep_all_but_their_words():
    pattern = re.compile(r"(?m)^(?:\d+ ?\n)?\d\d:.*-->.*$|<[/\w][^<>\n]*>|^WEBVTT.*$|^ *$")
    for suffix in (".srt", ".vtt"):
        for text in (WHOLE[suffix], *(generated(suffix, seed) for seed in range(GENERATED))):
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            changed = answered(text, suffix, lambda source: "Ça va")
            assert pattern.findall(text) == pattern.findall(changed)
    assert answered(VTT, ".vtt", str.upper).count("\n") == VTT.count("\n")


@pytest.mark.parametrize(
    "text, suffix, cause",
    [("Some text.\n", ".srt", "times"), ("", ".srt", "times"), (SRT, ".vtt", "WEBVTT")],
)
def test_files_that_are_no_subtitles_are_refused(text, suffix, cause):
    with pytest.raises(UserError, match=cause):
        spans(text, suffix)


def test_webvtt_without_times_has_nothing_to_decode():
    for text in "WEBVTT", "WEBVTT\n\nNOTE nothing was said\n":
        assert spans(text, ".vtt") == []
        assert answered(text, ".vtt", str.upper) == text


@pytest.mark.parametrize("mark, most", [("- ", 23), ("> ", 47), ("1. ", 23)])
def test_markdown_is_decoded_however_deep_it_nests_or_refused(mark, most):
    depths = range(1, most + 1)
    nested = "".join(f"{' ' * len(mark) * (n - 1)}{mark}level {n}\n" for n in depths)
    quoted = "".join(f"{mark * n}level {n}\n\n" for n in depths)
    for text in quoted, nested if mark != "> " else quoted:
        assert decoded(text, ".md") == [f"level {n}" for n in depths]
    with pytest.raises(UserError, match="more than 23 lists or 47 quotes in each other"):
        spans(mark * (most + 1) + "text", ".md")


def test_an_answer_has_as_many_lines_as_its_source():
    assert rewrapped("Hello there,\r\nmy friend.", "Bonjour mon ami") == "Bonjour\r\nmon ami"
    assert rewrapped("a\nb\nc", "one two") == "one\ntwo"
    assert rewrapped("a b c d", "one " * 50) == "one " * 50
    assert rewrapped("a b \n> c d", "x - y 1. z") == "x - \n> y 1. z"
    assert rewrapped("今日は\n良い天気", "「今天」天气很好。") == "「今天」天\n气很好。"
    assert rewrapped("a\nb", "") == ""
    assert rewrapped("a\nb", "a b") == "a\nb"


@pytest.mark.parametrize("space", ODD_SPACES)
def test_odd_white_space_of_an_answer_is_kept(space):
    answer = f"{space}one two{space}! {space} three{space}"
    assert rewrapped("a\nb", answer) == f"{space}one two{space}!\n{space} three{space}"


def test_lines_that_would_be_long_become_more():
    answer = "word " * 40
    lines = rewrapped("a line\nand another", answer).split("\n")
    assert len(lines) == 5 and max(map(len, lines)) <= LINE_CHARACTERS
    lines = rewrapped("a line " * 12 + "\nand another", answer).split("\n")
    assert len(lines) == 3 and max(map(len, lines)) <= 84


def test_lines_are_as_short_as_their_number_allows():
    rng = Random(1)
    for _ in range(300):
        words = ["x" * rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
        count = rng.randint(2, 4)
        lines = rewrapped("\n".join("abc" for _ in range(count)), " ".join(words)).split("\n")
        assert " ".join(lines) == " ".join(words) and len(lines) == min(count, len(words))
        cuts = combinations(range(1, len(words)), len(lines) - 1)
        bounds = ([0, *cut, len(words)] for cut in cuts)
        widths = (
            max(len(" ".join(words[a:b])) for a, b in zip(ends, ends[1:], strict=False))
            for ends in bounds
        )
        assert max(map(len, lines)) == min(widths)


def test_a_wrapped_source_is_decoded_on_one_line():
    assert unwrapped("a \r\n> > b\rc\n  d") == "a b c d"


MARKS = (
    "` [ ![ [a]( [a]: < <a <!-- <![CDATA[ <? & \\ > - *_ | # 1. http:// a@ [^ ~ ``` a\\_ 「 \1 {\\ "
    "<a> ♪ 0:0 --> &gt; . ( \" ' = +".split()
)


@pytest.mark.parametrize("suffix, begin", [(".md", "x "), (".srt", SRT), (".vtt", VTT)])
def test_files_full_of_marks_come_back_unchanged(suffix, begin):
    for mark in (*MARKS, "- a\n", "> a\n", "a|b\n-|-\n", "[ ] ", "a\\\n"):
        text = begin + mark * 500 + " y"
        assert answered(text, suffix, str) == text


@pytest.mark.parametrize("suffix, begin", [(".md", "x "), (".srt", SRT), (".vtt", VTT)])
def test_the_time_for_long_files_grows_with_their_length(suffix, begin):
    """Patterns with quadratic time would not finish on these files."""
    for mark in ("a", " ", "a b ", "a.b-", "漢"):
        text = begin + (mark * 200_000)[:200_000] + " y"
        assert answered(text, suffix, str) == text
