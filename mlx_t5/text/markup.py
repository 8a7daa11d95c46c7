"""Finds the words of a file with markup, and breaks an answer into lines like its source.

A file is Markdown, SubRip (.srt) or WebVTT (.vtt) subtitles, or plain text. `spans` lists the
file's stretches of words, called spans. A plain text is one span; any other span has at least one
letter. Everything else stays as it is. So if the answer to every span is the span itself, the file
is reproduced byte for byte.

Markdown is parsed as CommonMark with GitHub's tables. These parts stay as they are: whole headings,
code, HTML, front matter, reference definitions, links, images, addresses, escapes, and the marks of
lists, quotes and tables. A span ends at such a part, even within a sentence. The part is not
replaced by a placeholder within the span, because models garble placeholders. Marks of emphasis are
decoded with the words.

In subtitles only the words of the cues are decoded. Numbers, times, tags, music notes and the marks
of a change of speaker stay as they are. A change of speaker starts a new span.

Time and memory grow linearly with the file's size, because no regular expression here scans the
same text again from every position.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

from mlx_t5.errors import UserError

SUFFIXES = (".txt", ".md", ".srt", ".vtt")
PLAIN = ("", ".txt")
# Length in characters that a line of subtitles may have, even if the source's lines are shorter.
LINE_CHARACTERS = 42
DEEPEST = 50  # levels in Markdown: a list counts as two, a quote as one, text inside as three

# A line break with the white space and the quote marks around it.
_BREAK = re.compile(r"(?<![ \t])[ \t]*(?:\r\n?|\n)[ \t>]*")
_HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_OPENING = "「『（〈《【〔［"
# A unit that no line break divides: a word, or a character of a script without spaces. A mark that
# would begin a list, a heading or a quote stays in the unit of the word before it. No-break spaces
# and other characters that the format does not treat as spaces are parts of words.
_UNIT = re.compile(
    rf"[ \t]*(?:[{_OPENING}]*[{_HAN}](?:[^\w\s{_OPENING}]|ー)*|[^ \t{_HAN}{_OPENING}]+"
    rf"|[{_OPENING}]+)(?: (?:[-–—+*=#~|]+|\d{{1,9}}[.)]|>\S*)(?= |\Z))*"
)

# In a copy of the text, these two characters overwrite the parts that stay. Letters that touch such
# a part, like the s in "`list`s", stay as well.
_CUT, _STUMP = "\1", "\0"
_STUMPS = re.compile(r"`|!?\[(?!\^)")
_LETTERS = r"0-9A-Za-z_\u00aa-\u058f"  # letters of scripts with spaces between words
_STUMPED = re.compile(rf"(?<![{_LETTERS}{_STUMP}])[{_LETTERS}]*{_STUMP}[{_LETTERS}{_STUMP}]*")
_LEFT = re.compile(rf"[^\s{_CUT}](?:[^{_CUT}]*[^\s{_CUT}])?")
# Punctuation beside a part that stays, up to white space, stays too: the comma in "`x`, and".
_LOOSE = re.compile(r"\W*\s")

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(?=\S)(?:.*\n)*?\1[ \t]*(?:\n|\Z)")
# Further parts that are not text, besides CommonMark's inline code, links and tags: hard line
# breaks, footnotes, the lines of tables, task boxes, GitHub's alerts, addresses.
_ASIDE = re.compile(
    r"(?m)(?:  |\\)\t?\n|\||\[\^[^\]\s]{1,99}\]:?|^\[[ xX]\](?=\s)|^\[!\w{1,20}\]"
    r"|(?:https?://|ftp://|www\.)[^\s<>]*[^\s<>.,;:!?'\")\]*_~]"
    r"|(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{0,253}\w"
)

# A line of times, with the number before it. It may differ from the formats' definition as programs
# and people write it: with direction marks, a minus or another arrow. Any other line is text.
_GAP = r"(?:[^\S\n]|[\ufeff\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069])*"
_TIME = rf"(?:[-−]{_GAP})?\d+{_GAP}[:：]{_GAP}\d+(?:{_GAP}[:：.,，]{_GAP}\d+)"  # three numbers
_ARROW = rf"{_GAP}[-‐-―−](?:{_GAP}[-‐-―−])*{_GAP}(?:>|&gt;){_GAP}"
_TIMES = re.compile(
    rf"(?m)^(?:{_GAP}\d+{_GAP}\n)?{_GAP}"
    rf"(?:{_TIME}+(?:{_GAP}-->|{_ARROW}{_TIME})|{_TIME}*{_GAP}-->{_GAP}{_TIME}*)[^\n]*(?:\n|\Z)"
)
_BLOCK = re.compile(r"(?m)(?:^[^\S\n]*\S[^\n]*(?:\n|\Z))+")
_TAG = r"<[/\w][^<>]*>|\{\\[^{}]*\}"
# Marks of a change of speaker, tags, music notes, character references, and misplaced times.
_CUE_MARK = re.compile(
    rf"(?m)^(?:[ \t]|{_TAG})*(?:[-‐–—]|>|&gt;)+|{_TAG}|[♪♫♬]+|&(?:\w{{1,31}}|#\w{{1,7}});"
    r"|(?:\d{1,3}:\d\d:\d\d[.,]|\d\d:\d\d[.,]\d\d)\d+"
)


class Span(NamedTuple):
    """The characters [start, end) of a file's text, which are words to decode.

    Attributes:
        start: position of the first character.
        end: position after the last character.
        wrapped: whether line breaks in the span are only typesetting. If so, the text that
            `unwrapped` returns is decoded, and `rewrapped` breaks the answer into lines.
    """

    start: int
    end: int
    wrapped: bool


def spans(text: str, suffix: str) -> list[Span]:
    """Finds the stretches of words in a file.

    Args:
        text: the file's text, with its own line ends.
        suffix: the end of the file's name, one of `SUFFIXES`; "" stands for plain text too.

    Returns:
        The spans in order; they do not overlap. A plain text is one span, with its white space.
        Other spans do not begin or end with white space.

    Raises:
        UserError: the file has the suffix of subtitles but not their format, or Markdown is nested
            too deeply.
    """
    begin = int(text.startswith("\ufeff"))  # a byte order mark
    if suffix in PLAIN:
        return [Span(begin, len(text), False)] if text[begin:] else []
    # All line ends become "\n", and no position changes.
    even = text[begin:].replace("\r\n", "\t\n").replace("\r", "\n").replace("\0", "\ufffd")
    stretches = _markdown(even) if suffix == ".md" else _subtitles(even, suffix)
    return [Span(begin + start, begin + end, wrapped) for start, end, wrapped in stretches]


def unwrapped(source: str) -> str:
    """Returns a text on one line: a line break, with spaces and ">" around it, becomes a space."""
    return _BREAK.sub(" ", source)


def flattened(text: str) -> str:
    """Returns a file's text with spaces in place of line breaks; all positions stay the same."""
    return _BREAK.sub(lambda gap: " " * len(gap[0]), text)


def rewrapped(source: str, answer: str) -> str:
    """Breaks an answer into lines like its source.

    If the answer has enough words, it gets the source's number of lines, of about equal length. It
    gets more lines if a line would be longer than both the source's longest line and
    `LINE_CHARACTERS`. If the source is one line, the answer is one line.

    Args:
        source: a text of one or more lines, such as a span.
        answer: the answer to `unwrapped(source)`.

    Returns:
        The answer with the source's kind of line breaks; the source itself if the answer equals
        `unwrapped(source)`.
    """
    breaks = _BREAK.findall(source)
    if not breaks or answer == unwrapped(source):
        return source if breaks else answer
    units = _UNIT.findall(unwrapped(answer))
    longest = max(LINE_CHARACTERS, *map(len, _BREAK.split(source)))
    count = max(len(breaks) + 1, len(_line_starts(units, 1, longest)))
    limits = range(1, len(answer) + 2)  # to find the narrowest lines
    enough = bisect_left(limits, True, key=lambda n: len(_line_starts(units, count, n)) <= count)
    starts = [*_line_starts(units, count, limits[enough]), len(units)]
    lines = ["".join(units[start:end]).strip(" \t") for start, end in pairwise(starts)]
    gaps = chain(breaks, repeat(breaks[-1]))
    return lines[0] + "".join(gap + line for line, gap in zip(lines[1:], gaps, strict=False))


def _line_starts(units: list[str], count: int, limit: int) -> list[int]:
    """Returns the indices of the units that begin lines; a unit is a word or a character (`_UNIT`).

    A line has at most `limit` characters, unless it is a single longer unit. There are at least
    `count` lines, if there are enough units.
    """
    starts, length = [0], 0
    for n, unit in enumerate(units):
        length += len(unit)
        if n and (length > limit or len(units) - n <= count - len(starts)):
            starts.append(n)
            length = len(unit.lstrip(" \t"))
    return starts


def _words(text: str, stays: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields start and end of each stretch of words in a paragraph or cue.

    `stays` gives start and end of each stretch that stays as it is, such as code or a tag.
    """
    masked = list(text)
    for start, end in stays:
        within = text[start - 1 : start].isalnum() and text[end : end + 1].isalnum()
        stump = _STUMPS.match(text, start) or (within and text[end - 1] not in "\n|")
        masked[start:end] = (_STUMP if stump else _CUT) * (end - start)
    plain = _STUMPED.sub(lambda match: _CUT * len(match[0]), "".join(masked)).rstrip()
    for match in _LEFT.finditer(plain):
        start, end = match.span()
        if start and (loose := _LOOSE.match(text, start, end)):
            start = loose.end()
        if end < len(plain) and (loose := _LOOSE.match(text[start:end][::-1])):
            end -= loose.end()
        if any(map(str.isalpha, text[start:end])):
            yield start, end


def _markdown(text: str) -> Iterator[Span]:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import paragraph, table
    from markdown_it.rules_inline import StateInline

    text = _FRONT_MATTER.sub(lambda front: "\n" * len(front[0]), text)
    passages: list[list[tuple[int, int]]] = []  # of each, the positions of its lines

    def recording(rule: Callable, state: Any, first: int, last: int, silent: bool) -> bool:
        matched = rule(state, first, last, silent)
        if matched and not silent:
            numbers = range(first, state.line)
            lines = [(state.bMarks[n] + state.tShift[n], state.eMarks[n]) for n in numbers]
            passages.extend([[line] for line in lines] if rule is table else [lines])
        return matched

    parser = MarkdownIt("commonmark", {"maxNesting": DEEPEST}).enable("table")
    parser.block.ruler.at("paragraph", partial(recording, paragraph))
    parser.block.ruler.at("table", partial(recording, table), {"alt": ["paragraph", "reference"]})
    env, tokens = dict[str, Any](), list[Any]()
    parser.block.parse(text, parser, env, tokens)
    if any(token.level > DEEPEST - 2 for token in tokens):  # the parser omits deeper levels
        most = f"{DEEPEST // 2 - 2} lists or {DEEPEST - 3} quotes"
        raise UserError(f"this Markdown has more than {most} in each other; flatten it")
    for lines in passages:
        content = "\n".join(text[start:end] for start, end in lines)
        places = [place for start, end in lines for place in range(start, end + 1)]
        for start, end in _words(content, _inline(StateInline(content, parser, env, []))):
            yield Span(places[start], places[end - 1] + 1, "\n" in content[start:end])


def _inline(state: Any) -> Iterator[tuple[int, int]]:
    """Yields start and end of each part of a Markdown paragraph that stays as is, such as code."""
    while state.pos < state.posMax:
        start = state.pos
        state.md.inline.skipToken(state)
        if state.src[start] in "`[!<\\&" and state.pos - start > 1:
            yield start, state.pos
    yield from map(re.Match.span, _ASIDE.finditer(state.src))


def _subtitles(text: str, suffix: str) -> Iterator[Span]:
    times = list(_TIMES.finditer(text))
    if suffix == ".vtt" and not text.startswith("WEBVTT"):
        raise UserError('a .vtt file begins with "WEBVTT"; this one does not: is it an .srt file?')
    if suffix == ".srt" and not times:
        raise UserError("an .srt file has times, as in 00:00:01,000 --> 00:00:04,000: none is here")
    ends = [*(time.start() for time in times), len(text)][1:]
    for time, end in zip(times, ends, strict=True):
        for block in _BLOCK.finditer(text, time.end(), end):
            if suffix == ".vtt" and block.start() > time.end():
                break  # an empty line ends a cue; but sloppy .srt files have empty lines in cues
            for first, last in _words(block[0], map(re.Match.span, _CUE_MARK.finditer(block[0]))):
                yield Span(block.start() + first, block.start() + last, True)
