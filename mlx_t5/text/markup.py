"""Which characters of a file may be decoded, and how the lines of an answer are broken again.

A file is a text with markup: Markdown, SubRip (.srt) or WebVTT (.vtt) subtitles, or plain text.
`spans` lists the stretches of words in it. All else stays as it is, so a file whose every span is
answered with itself comes back to the byte. Only spans with a letter count.

Markdown is read as CommonMark with GitHub's tables. Headings, code, HTML, front matter, reference
definitions, links, images, addresses, escapes and the marks of lists, quotes and tables stay. The
text between them is cut there, as a model would garble a placeholder. Emphasis goes with the text.

Work and memory grow in proportion to the file: every regular expression here is anchored, bounded,
or starts only where the one before has ended.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, paragraph, table
from markdown_it.rules_inline import StateInline

from mlx_t5.errors import UserError

SUFFIXES = (".txt", ".md", ".srt", ".vtt")
# A line of a subtitle may have so many characters even if the source's lines are shorter.
LINE_CHARACTERS = 42

# A line break with the white space and the quote marks around it.
_BREAK = re.compile(r"(?<![ \t])[ \t]*(?:\r\n?|\n)[ \t>]*")
_HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_OPENING = "「『（〈《【〔［"
# What a line break keeps together: a word, or a character of a script that has no spaces. Marks
# that would begin a list, a heading or a quote stay behind the word before them.
_UNIT = re.compile(
    rf"\s*(?:[{_OPENING}]*[{_HAN}](?:[^\w\s{_OPENING}]|ー)*|[^\s{_HAN}{_OPENING}]+|[{_OPENING}]+)"
    r"(?: (?:[-–—+*=#~|]+|\d{1,9}[.)]|>\S*)(?= |\Z))*"
)

# In a copy of the text, what stays is overwritten by one of these. Letters that touch a stump, as
# in "`list`s", stay as well.
_CUT, _STUMP = "\1", "\0"
_LETTERS = r"0-9A-Za-z_\u00aa-\u058f"  # of scripts that put spaces between words
_STUMPED = re.compile(rf"(?<![{_LETTERS}{_STUMP}])[{_LETTERS}]*{_STUMP}[{_LETTERS}{_STUMP}]*")
_LEFT = re.compile(f"[^{_CUT}]+")
_LETTER = re.compile(r"[^\W\d_]")
# Beside what stays, words lose the marks up to a white space: the comma after `x` in "`x`, and".
_LOOSE = re.compile(r"\W*\s")

_FRONT_MATTER = re.compile(r"(---|\+\+\+)[ \t]*\n(?=\S)(?:.*\n)*?\1[ \t]*(?:\n|\Z)")
# What is not text beside CommonMark's inline code, links and tags: hard line breaks, footnotes,
# boxes of tasks, GitHub's alerts, addresses.
_ASIDE = re.compile(
    r"(?:  |\\)\t?\n|\[\^[^\]\s]{1,99}\]:?|^\[[ xX]\](?=\s)|^\[!\w{1,20}\]"
    r"|(?:https?://|ftp://|www\.)[^\s<>]*[^\s<>.,;:!?'\")\]*_~]"
    r"|(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{0,253}\w",
    re.MULTILINE,
)
_CELL = re.compile(r"(?:[^|]|(?<=\\)\|)+")

_TIMES = re.compile(r"\s*\d+:\d[\d:., ]*-+>")
_LINE = re.compile(r"[^\n]*\n?")
_TAG = r"<[/\w][^<>]*>|\{\\[^{}]*\}"
# The marks that give the turn to another speaker, tags, music, characters by their names.
_CUE_MARK = re.compile(
    rf"^(?:[ \t]|{_TAG})*(?:[-‐–—]|>|&gt;)+|{_TAG}|[♪♫♬]+|&(?:\w{{1,31}}|#\w{{1,7}});", re.MULTILINE
)


class Span(NamedTuple):
    """Characters [start, end) of a file's text, which may be decoded.

    Attributes:
        start: position of the first character.
        end: position after the last.
        wrapped: whether its line breaks are typesetting: `unwrapped` is decoded then, and the
            answer goes through `rewrapped`.
    """

    start: int
    end: int
    wrapped: bool


def spans(text: str, suffix: str) -> list[Span]:
    """Finds what may be decoded in a file.

    Args:
        text: the file's text, its line ends as they are.
        suffix: of the file's name, one of `SUFFIXES`.

    Returns:
        The spans in order. They do not overlap; except for plain text, which is one span, they
        begin and end with no white space.

    Raises:
        UserError: it should have subtitles and is no such file.
    """
    begin = int(text.startswith("\ufeff"))  # a byte order mark
    if suffix == ".txt":
        return [Span(begin, len(text), False)] if text[begin:] else []
    # One kind of line end, and the same positions as in the text.
    even = text[begin:].replace("\r\n", "\t\n").replace("\r", "\n").replace("\0", "\ufffd")
    found = _markdown(even) if suffix == ".md" else _subtitles(even, suffix)
    return [Span(begin + start, begin + end, wrapped) for start, end, wrapped in found]


def unwrapped(source: str) -> str:
    """The text of a wrapped span as it is decoded: spaces in the place of its line breaks."""
    return _BREAK.sub(" ", source)


def rewrapped(source: str, answer: str) -> str:
    """Breaks an answer into lines as its source was.

    It has as many lines as the source, of about the same length, if it has as many words. If a
    line would then be longer than the source's longest one and `LINE_CHARACTERS`, there are more
    lines. A source of one line is answered with one line.

    Args:
        source: the text of a wrapped span.
        answer: to `unwrapped(source)`.

    Returns:
        The answer with line breaks of the source; the source itself if the answer equals it.
    """
    breaks = _BREAK.findall(source)
    if not breaks or answer == unwrapped(source):
        return source if breaks else answer
    units = _UNIT.findall(" ".join(answer.split()))
    longest = max(LINE_CHARACTERS, *map(len, _BREAK.split(source)))
    count = max(len(breaks) + 1, len(_line_starts(units, 1, longest)))
    low, high = 1, len(answer)
    while low < high:  # the narrowest lines that are as many
        limit = (low + high) // 2
        if len(_line_starts(units, count, limit)) > count:
            low = limit + 1
        else:
            high = limit
    starts = [*_line_starts(units, count, low), len(units)]
    lines = ["".join(units[a:b]).strip() for a, b in pairwise(starts)]
    gaps = chain(breaks, repeat(breaks[-1]))
    return lines[0] + "".join(gap + line for line, gap in zip(lines[1:], gaps, strict=False))


def _line_starts(units: list[str], count: int, limit: int) -> list[int]:
    """Which units begin a line of at most `limit` characters, in at least `count` lines."""
    starts, length = [0], 0
    for n, unit in enumerate(units):
        length += len(unit)
        if n and (length > limit or len(units) - n <= count - len(starts)):
            starts.append(n)
            length = len(unit.lstrip())
    return starts


def _words(text: str, stays: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, int]]:
    """Where words are left in a paragraph or a cue.

    Args:
        text: the characters.
        stays: what stays of them: from, to, and `_CUT` or `_STUMP`.
    """
    masked = list(text)
    for start, end, mark in stays:
        masked[start:end] = mark * (end - start)
    left = _STUMPED.sub(lambda match: _CUT * len(match[0]), "".join(masked))
    for match in _LEFT.finditer(left):
        start, end = match.span()
        if start and (loose := _LOOSE.match(text, start, end)):
            start = loose.end()
        if end < len(text) and (loose := _LOOSE.match(text[start:end][::-1])):
            end -= loose.end()
        if _LETTER.search(text, start, end):
            words = text[start:end]
            yield end - len(words.lstrip()), start + len(words.rstrip())


def _mark(text: str, start: int, end: int) -> str:
    """How characters stay: as a stump where they stand within a word."""
    within = start > 0 and end < len(text) and text[start - 1].isalnum() and text[end].isalnum()
    return _STUMP if within else _CUT


def _markdown(text: str) -> Iterator[Span]:
    if front := _FRONT_MATTER.match(text):
        text = "\n" * front.end() + text[front.end() :]
    passages: list[list[tuple[int, int]]] = []  # where the lines of each lie

    def cells(rows: list[tuple[int, int]]) -> None:
        for row in rows[:1] + rows[2:]:
            passages.extend([cell.span()] for cell in _CELL.finditer(text, *row))

    def recorded(rule: Callable, record: Callable) -> Callable:
        def recording(state: StateBlock, first: int, last: int, silent: bool) -> bool:
            found = rule(state, first, last, silent)
            if found and not silent:
                numbers = range(first, state.line)
                record([(state.bMarks[n] + state.tShift[n], state.eMarks[n]) for n in numbers])
            return found

        return recording

    parser, env = MarkdownIt("commonmark").enable("table"), dict[str, Any]()
    parser.block.ruler.at("paragraph", recorded(paragraph, passages.append))
    parser.block.ruler.at("table", recorded(table, cells), {"alt": ["paragraph", "reference"]})
    parser.block.parse(text, parser, env, [])
    for lines in passages:
        content = "\n".join(text[start:end] for start, end in lines)
        begins = list(accumulate((end - start + 1 for start, end in lines), initial=0))
        shifts = [start - begin for (start, _), begin in zip(lines, begins, strict=False)]
        for start, end in _words(content, _inline(StateInline(content, parser, env, []))):
            first, last = bisect(begins, start) - 1, bisect(begins, end - 1) - 1
            yield Span(start + shifts[first], end + shifts[last], first != last)


def _inline(state: StateInline) -> Iterator[tuple[int, int, str]]:
    """What stays of a paragraph."""
    text = state.src
    while state.pos < state.posMax:
        start = state.pos
        state.md.inline.skipToken(state)
        if text[start] in "`[!<\\&" and state.pos - start > 1:
            mark = _STUMP if text[start] in "`[!" else _mark(text, start, state.pos)
            yield start, state.pos, mark
    yield from ((*match.span(), _CUT) for match in _ASIDE.finditer(text))


def _subtitles(text: str, suffix: str) -> Iterator[Span]:
    if suffix == ".vtt" and not re.match(r"WEBVTT(?:\s|\Z)", text):
        raise UserError('a .vtt file begins with a line "WEBVTT"; add it, or is it an .srt file?')
    if suffix == ".srt" and not any(map(_TIMES.match, text.split("\n"))):
        example = "00:00:01,000 --> 00:00:04,000"
        raise UserError(f"an .srt file has lines of times such as {example}; there is none")
    in_cue, cue = False, list[re.Match]()
    for line in _LINE.finditer(text):
        if times := "-->" in line[0] or _TIMES.match(line[0]):
            if suffix == ".srt" and cue and cue[-1][0].strip().isdigit():
                cue.pop()  # the next cue's number, without an empty line before it
        elif line[0].strip():
            cue += [line] * in_cue
            continue
        if cue:
            begin, content = cue[0].start(), text[cue[0].start() : cue[-1].end()]
            marks = [
                (*m.span(), _mark(content, *m.span()) if m[0][0] == "&" else _CUT)
                for m in _CUE_MARK.finditer(content)
            ]
            for start, end in _words(content, marks):
                yield Span(begin + start, begin + end, True)
        # A sloppy .srt file has empty lines within a text.
        in_cue, cue = bool(_TIMES.match(line[0])) if times else in_cue and suffix == ".srt", []
