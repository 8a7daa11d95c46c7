"""Tests which words of subtitles are decoded, what stays, and how answers are broken into lines."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from itertools import combinations, permutations
from pathlib import Path
from random import Random
from string import ascii_letters

import pytest

from mlx_t5.errors import UserError
from mlx_t5.settings import SPLITS, SUBTITLES
from mlx_t5.text.documents import Document, DocumentOptions
from mlx_t5.text.subtitles import LINE_WIDTH, find_words, rewrapped

FILES = Path(__file__).with_name("files")
# The files end no line with a space: · stands for it.
WHOLE = {s: (FILES / f"written{s}").read_text("utf-8").replace("·", " ") for s in SUBTITLES}
SRT, VTT = WHOLE[".srt"].rstrip("\n"), WHOLE[".vtt"]
# Times of a cue, as programs and people write them.
ODD_TIMES = (FILES / "odd_times.txt").read_bytes().decode("unicode_escape").splitlines()
# White space in Python that ends no word or line of a file, and characters without a width.
ODD_SPACES = "\x1c\x1d\x1e\x1f\x85\xa0\u2007\u2028\u202f\u3000\u200b\ufeff\u200e"
WORDS = (
    "the café naïve house I've Straße größer 12 3.5 — “quoted” привет 今日は良い 天気。 ไทย 😀 é "
    "a _b_ **bold** *it* x_y don't U.S. (see end). Yes! no? ~ $5 100% a/b"
).split()
MARKS = (
    "<i>|</i>|<b>|</b>|<font color='red'>|{\\an8}|<v Anna>|<c.red>|</c>|<00:00:01.500>|<c> it|"
    "&gt;&gt;|- |-|♪|<|>|3|  |<00|{x}|-->x|<br>|<BR />|&nbsp;|&mdash;|&#39;|&quot;|&lt;|&amp;|&x;|"
    "ANNA: |[Anna] |- Bob: |王：|https://a.io/?b=1&amp;c".split("|")
)


def generated(suffix: str, seed: int) -> str:
    """Returns a file of random lines of the hand-written file, some with other words or times.

    It has any kind of line end, and sometimes a byte order mark.
    """
    rng = Random(f"{suffix} {seed}")
    known = [line for line in WHOLE[suffix].split("\n") if not line.startswith("WEBVTT")]
    lines = rng.choices(known, k=rng.randint(1, 25))
    lines = [varied(rng, line) if rng.random() < 0.4 else line for line in lines]
    head = {".srt": "1\n00:00:01,000 --> 00:00:02,000\n", ".vtt": "WEBVTT\n\n"}[suffix]
    text, newline = head + "\n".join(lines), rng.choice(["\n", "\r\n", "\r", ""])
    newlines = [newline] if newline else ["\n", "\r\n", "\r"]
    text = "".join(rng.choice(newlines) if char == "\n" else char for char in text)
    return "\ufeff" * (rng.random() < 0.2) + text


def varied(rng: Random, line: str) -> str:
    if "-->" in line:
        return rng.choice(ODD_TIMES).format(number := rng.randint(1, 8), number + 1)
    words = rng.choices([*WORDS, *MARKS], k=rng.randint(1, 9))
    gaps = ("", " ", " ", " ", "  ", rng.choice(ODD_SPACES))
    return re.match(r"[^\w<{]*", line)[0] + "".join(word + rng.choice(gaps) for word in words)


def translated(
    text: str,
    suffix: str,
    answer: Callable[[str], str | None],
    split: str = "sentences",
    limit: int | None = None,
) -> str:
    """Returns the document with the answers to its pieces; None: the piece failed."""
    options = DocumentOptions(split, "", max_source_tokens=limit, file_type=suffix)
    document = Document(text, options, lambda prompt: len(prompt.split()))
    answers = [(piece, answer(document.source(piece))) for piece in document.cut()]
    texts = [document.answered(*pair) for pair in answers]
    parts = [document.part(i, texts) for i in range(len(texts))]
    return "".join([*parts, document.before(len(texts))])


def decoded(text: str, suffix: str) -> list[str]:
    document = Document(text, DocumentOptions("lines", "", file_type=suffix), len)
    return [document.source(piece) for piece in document.cut()]


def timeless(text: str) -> str:
    """Returns a text without the times of words, the one thing that a translation cannot keep."""
    time = r"(?:<\d+:\d\d[\d:.]*>|</?c(?:\.[^<>\s]*)?>)"
    line = rf"(?<![^\r\n])(?:[ \t]*{time})+[ \t]*(?:\r\n?|\n|\Z)"
    return re.sub(f"{line}|{time}", "", text)


# ---- what is decoded -----------------------------------------------------------------------------


def test_only_the_words_of_cues_are_decoded():
    assert decoded(SRT, ".srt") == [
        "Hello there, my friend.", "Who is it?", "It is", "me", "Bob.", "la la", "1986 R&D is not",
        "for me.", "The end",
    ]  # fmt: skip
    words = ["Hello", "you", "over there", "Hi you", "so what's this", "Here we are & there."]
    assert decoded(VTT, ".vtt") == words
    assert decoded("WEBVTT\n\nNOTE nothing was said\n", ".vtt") == []


@pytest.mark.parametrize(
    "cue, expected",
    [
        ("<i>Yes</i>", ["Yes"]),
        ("-Yes.\n-No.", ["Yes.", "No."]),
        ("<i>- Yes\nand no</i>\n– Oh", ["Yes and no", "Oh"]),
        (">> Yes\n&gt;&gt; No", ["Yes", "No"]),
        ("\u3000- はい", ["はい"]),
        ("{\\an8}Up <i>there</i>, far", ["Up", "there", "far"]),
        ("Un<b>do</b> it, <i>re<b>do</b></i>it all", ["it,", "all"]),
        ("I <3 you", ["I <3 you"]),
        ("R&amp;D and don&#39;t &lt;3 &x;", ["R&D and don't <3 &x;"]),
        ("Yes&mdash;no<br />It&nbsp;is<BR>- No", ["Yes—no It is", "No"]),
        ("&quot;Oh,&quot; he <i>said.</i>", ['"Oh," he', "said."]),
        ("BOB: Hi.\n- MRS. B #2: Oh\nBoB: Us", ["Hi.", "Oh BoB: Us"]),
        ("[Bob] Hi.\n<i>[Music]\n[door opens] Oh</i>", ["Hi.", "[Music] [door opens] Oh"]),
        ("Bob: A.\n- Bob: B.\n{\\an8}Bob:\nC: I say: no", ["A.", "B.", "C: I say: no"]),
        ("12\n…", []),
        ("Vraiment ?\nOui !", ["Vraiment ? Oui !"]),
        ("A -> B -->\n5:00 -> six\n1:2 --> 3", ["A -> B --> 5:00 -> six 1:2 --> 3"]),
        ("At 00:00:05,000 --> no\n2:00:05.5 or 00:05.000 yes", ["At", "no", "or", "yes"]),
    ],
)
def test_marks_of_a_cue_are_not_decoded(cue, expected):
    assert decoded(f"1\n00:00:01,000 --> 00:00:02,000\n{cue}\n", ".srt") == expected


@pytest.mark.parametrize("times", ODD_TIMES)
@pytest.mark.parametrize("suffix", SUBTITLES)
def test_odd_times_stay_and_begin_a_cue(suffix, times):
    cues = [f"{number}\n{times.format(number, number + 1)}\n{{}}\n" for number in range(1, 5)]
    words = ["One.", "Two\nlines.", "Three.", "Four."]
    for gap in "\n", "" if suffix == ".srt" else "\n":
        text = "WEBVTT\n\n" * (suffix == ".vtt") + gap.join(cues)
        assert decoded(text.format(*words), suffix) == [word.replace("\n", " ") for word in words]
        changed = translated(text.format(*words), suffix, str.swapcase)
        assert changed == text.format(*map(str.swapcase, words))


@pytest.mark.parametrize(
    "text, suffix, cause",
    [("Some text.\n", ".srt", "times"), ("", ".srt", "times"), (SRT, ".vtt", "WEBVTT")],
)
def test_files_in_another_format_are_refused(text, suffix, cause):
    with pytest.raises(UserError, match=cause):
        find_words(text, suffix)


# ---- what stays ----------------------------------------------------------------------------------

SWAPPED = {ord(a): b for a, b in zip(ascii_letters, ascii_letters.swapcase(), strict=True)}
TYPESET = dict.fromkeys(map(ord, " \t\r\n\xa0"))  # characters that break lines


def letters(text: str) -> str:
    """Returns what a text has beside its line breaks, whether they are letters or references."""
    text = html.unescape(re.sub("(?i)<br ?/?>", "", timeless(text)))
    return text.translate(TYPESET).lower()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("suffix", SUBTITLES)
def test_files_stay_but_for_the_words_that_are_answered(suffix, split):
    texts = [generated(suffix, seed) for seed in range(150)]
    texts += [WHOLE[suffix].replace("\n", newline) for newline in ("\n", "\r\n", "\r")]
    times = re.compile(r"(?m)^(?:\d+ ?\n)?\d\d:.*-->.*$|<(?!br|BR)[/\w][^<>\n]*>|^WEBVTT.*$|^ *$")
    for text in texts:
        for answer in str, lambda source: None:  # or all pieces fail
            for limit in (None, 2):
                same = translated(text, suffix, answer, split, limit)
                assert timeless(same) == timeless(text)
                assert same == text or re.search(r"<\d+:\d\d", text)
        changed = translated(text, suffix, lambda source: source.translate(SWAPPED), split)
        assert letters(text) == letters(changed)
        even = text.replace("\r\n", "\n").replace("\r", "\n")
        changed = translated(even, suffix, lambda source: "Ça va", split)
        assert times.findall(timeless(even)) == times.findall(timeless(changed))


def test_files_full_of_marks_are_read_in_linear_time():
    """Patterns with quadratic time would not finish on these files."""
    marks = "-|<|<!|<a>|&|>|{\\|♪|♪ |0:0|-->|&gt;|.|「|a| |a b |a.b-|漢|a<|a♪|a<b>|- a\n"
    for mark in marks.split("|"):
        text = SRT + (mark * 60_000)[:60_000] + " y"
        assert decoded(text, ".srt")[0].startswith("Hello")


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("lone", ["<00:00:01.500>", "<c>", " <c.red></c> <00:00:01.500>"])
def test_no_line_of_a_cue_becomes_empty(lone, newline):
    """An empty line would end the cue."""
    cue = "WEBVTT\n\n00:00:01.000 --> 00:00:02.000\n{}\n\n00:00:03.000 --> 00:00:04.000\nBye"
    lines = "Hello", lone, "my<00:00:01.700> friend", "♪ la ♪"
    for order in permutations(lines):
        text = cue.format("\n".join(order)).replace("\n", newline)
        kept = cue.format("\n".join(line for line in order if line != lone))
        expected = timeless(kept.replace("\n", newline))
        assert translated(text, ".vtt", lambda source: source) == expected
        assert translated(text, ".vtt", lambda source: " ") == expected, "an empty answer"


# ---- lines ---------------------------------------------------------------------------------------

CUE = "1\r\n00:00:01,000 --> 00:00:02,000\r\n{}\r\n\r\n"


def test_sentences_of_a_turn_are_broken_into_lines_together():
    text = CUE.format("I know. You have been\r\nhere before.")
    answers = {"I know.": "Je le sais bien.", "You have been here before.": "Tu es déjà venu ici."}
    whole = translated(text, ".srt", answers.get)
    assert whole == CUE.format("Je le sais bien. Tu\r\nes déjà venu ici.")
    answers["I know."] = None
    failed = translated(text, ".srt", answers.get)
    assert failed == CUE.format("I know. Tu es\r\ndéjà venu ici.")


def test_long_answers_have_more_lines():
    text = CUE.format("One two. Three four five.\r\nSix seven. Eight.") * 3
    longer = translated(text, ".srt", lambda source: source + " " + source)
    assert longer != text and max(map(len, longer.splitlines())) <= LINE_WIDTH
    assert longer.count("\r\n") == text.count("\r\n") + 3
    lines = rewrapped("a line\nand another", "word " * 40).split("\n")
    assert len(lines) == 5 and max(map(len, lines)) <= LINE_WIDTH
    lines = rewrapped("a line " * 12 + "\nand another", "word " * 40).split("\n")
    assert len(lines) == 3 and max(map(len, lines)) <= 84


def test_an_answer_has_as_many_lines_as_its_source():
    assert rewrapped("Hello there,\r\nmy friend.", "Bonjour mon ami") == "Bonjour\r\nmon ami"
    assert rewrapped("a\nb\nc", "one two") == "one\ntwo"
    assert rewrapped("a b c d", "one " * 50) == "one " * 50
    assert rewrapped("a b \n c d", "x - y 1. z") == "x - \n y 1. z"
    assert rewrapped("今日は\n良い天気", "「今天」天气很好。") == "「今天」\n天气很好。"
    assert rewrapped("今日は\n良い天気", "今天天气很好") == "今天天\n气很好", "without punctuation"
    assert rewrapped("a\nb", "") == ""
    assert rewrapped("a \r\n \tb", "a b") == "a \r\n \tb"
    for space in ODD_SPACES:
        answer = f"{space}one two{space}! {space} three{space}"
        assert rewrapped("a\nb", answer) == f"{space}one two{space}!\n{space} three{space}"


LONG = "Bien sûr, je ne sais pas où elle est allée hier"
SHOUT = "Elle a crié si fort"
MARKET = "我今天早上去了市场，买了很多新鲜的蔬菜和水果，然后就回家了。"


@pytest.mark.parametrize(
    "source, answers, expected",
    [
        ("Yes.", [LONG], "Bien sûr, je ne sais pas\noù elle est allée hier"),
        ("x" * 47, [LONG], LONG),
        (f"- Yes.\n- {'x' * 47}", [LONG, "Oui."], f"- {LONG}\n- Oui."),
        ("- Yes.\n- No.", ["Oui.", LONG],
         "- Oui.\n- Bien sûr, je ne sais pas\noù elle est allée hier"),
        ("MRS. BY: Yes.", [LONG], "MRS. BY: Bien sûr, je ne sais\npas où elle est allée hier"),
        ("MRS. BY: No\nmore.", ["Non."], "MRS. BY: Non."),
        ("<i>♪ Oh\nyes ♪</i>", ["Oui"], "<i>♪ Oui ♪</i>"),
        ("<i>Yes,\nor</i> no", [SHOUT] * 2, "<i>Elle a crié si fort</i>\nElle a crié si fort"),
        ("Yes <font color='a b'>no</font> or", [SHOUT] * 3,
         "Elle a crié si fort <font color='a b'>Elle a crié\nsi fort</font> Elle a crié si fort"),
        ("e" * 42, ["e\u0301" * 42], "e\u0301" * 42),
        ("Yes.", [MARKET[:21]], "我今天早上去了市场，买了很多新鲜的蔬菜和水"),
        ("Yes.", [MARKET], "我今天早上去了市场，\n买了很多新鲜的蔬菜和水果，然后就回家了。"),
        ("Yes.", [MARKET.replace("，", "")],
         "我今天早上去了市场买了很多新\n鲜的蔬菜和水果然后就回家了。"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_line_is_broken_if_it_is_wider_than_the_cue_was(source, answers, expected, newline):
    cue, rest = "1\n00:00:01,000 --> 00:00:02,000\n{}\n", iter(answers)
    text = (cue.format(source) + "\n" + cue.format("...")).replace("\n", newline)
    changed = (cue.format(expected) + "\n" + cue.format("...")).replace("\n", newline)
    assert translated(text, ".srt", lambda _: next(rest), "lines") == changed
    assert not list(rest) and translated(text, ".srt", str) == text


def test_no_line_is_wider_than_its_cue_was_and_no_tag_is_broken():
    rng, tag = Random(2), re.compile(r"<[^<>]*>")
    tags = [("<i>", "</i>"), ("<c.a b>", "</c>"), ("", "")]
    time = "00:00:01.000 --> 00:00:02.000\n"

    def widest(lines: str) -> int:
        return max(len(html.unescape(tag.sub("", line))) for line in lines.split("\n"))

    for suffix in SUBTITLES:
        cues = []
        for _ in range(200):
            words = ["x" * rng.randint(1, 9) + rng.choice(["", ".", "&amp;"]) for _ in range(9)]
            for opening, closing in rng.choices(tags, k=2):
                a, b = sorted(rng.choices(range(9), k=2))
                words[a], words[b] = opening + words[a], words[b] + closing
            text = rng.choice([" ", "\n"]).join([" ".join(words[:4]), " ".join(words[4:])])
            cues.append(rng.choice(["", "- ", "ANNA: ", "♪ "]) + text + rng.choice(["", " ♪"]))
        text = "WEBVTT" + "".join(f"\n\n{time}{cue}" for cue in cues)
        changed = translated(text, suffix, lambda source: f"{source} {source}", "lines")
        answers = changed.split(f"\n\n{time}")[1:]
        assert sum(map(len, answers)) > 1.4 * sum(map(len, cues))
        for cue, answer in zip(cues, answers, strict=True):
            assert widest(answer) <= max(LINE_WIDTH, widest(cue))
            assert tag.findall(answer) == tag.findall(cue)


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
