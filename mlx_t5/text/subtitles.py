"""Finds the words of SubRip (.srt) and WebVTT (.vtt) subtitles, and breaks answers into lines.

Only the words of the cues are decoded. Numbers, times, tags, music notes and the names of speakers
and marks of their turns stay as they are, so a file whose answers equal its words is reproduced
byte for byte, but for the times inside of cues (YouTube's), which no translation can keep.

Time and memory grow linearly with the file's size, because no regular expression here scans the
same text again from every position.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, repeat

from mlx_t5.errors import UserError
from mlx_t5.text.masking import CR, GONE, NAME, REST, mask

LINE_WIDTH = 42  # columns that a line may have, even if the source's lines are shorter
GLUE = "\ufdd1"  # a space at which no line is broken; no character of any text

_BREAK = re.compile(r"(?<![ \t])[ \t]*(?:\r\n?|\n|<[bB][rR] ?/? ?>)[ \t]*")
_HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_OPENING = "「『（〈《【〔［"
# Units that no line break divides: a word, or a phrase up to its punctuation or else a character of
# a script without spaces. A mark that would begin a list or a speaker's turn stays behind the word
# before it. No-break spaces are parts of words.
_PHRASE, _WORD = (
    re.compile(
        rf"[ \t]*(?:[{_OPENING}]*[{_HAN}]{more}(?:[^\w\s{_OPENING}]|ー)*|[^ \t{_HAN}{_OPENING}]+"
        rf"|[{_OPENING}]+)(?: (?:[-–—+*>]+|\d{{1,9}}[.)])(?= |\Z))*"
    )
    for more in ("+", "")
)

# A line of times, with the number before it. It may differ from the formats' definition as programs
# and people write it: with direction marks, a minus or another arrow. Any other line is text.
_GAP = rf"(?:[^\S\n]|[\ufeff\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069{REST}])*"
_TIME = rf"(?:[-−]{_GAP})?\d+{_GAP}[:：]{_GAP}\d+(?:{_GAP}[:：.,，]{_GAP}\d+)"  # three numbers
_ARROW = rf"{_GAP}[-‐-―−](?:{_GAP}[-‐-―−])*{_GAP}>{_GAP}"
_TIMES = re.compile(
    rf"(?m)^(?:{_GAP}\d+{_GAP}\n)?{_GAP}"
    rf"(?:{_TIME}+(?:{_GAP}-->|{_ARROW}{_TIME})|{_TIME}*{_GAP}-->{_GAP}{_TIME}*)[^\n]*(?:\n|\Z)"
    rf"(?:[ \t]+{CR}?\n)*"  # YouTube's cues begin with a line of one space
)
_BLOCK = re.compile(r"(?m)(?:^[^\S\n]*\S[^\n]*(?:\n|\Z))+")
_TAG = r"<[/\w][^<>]*>|\{\\[^{}]*\}"
# Marks and names of a change of speaker, tags, music notes, and misplaced times.
_MARK = (
    rf"(?:^(?:[^\S\n]|{_TAG})*(?:[-‐–—>]{REST}*)+|{NAME}+|{_TAG}|[♪♫♬]"
    r"|(?:\d{1,3}:\d\d:\d\d[.,]|\d\d:\d\d[.,]\d\d)\d+)"
)
_HIDDEN = re.compile(rf"{_TAG}|&#?\w{{1,31}};")  # tags, and character references
# A cue in which each word has a time: <00:00:00.480><c> word</c>.
_INLINE_TIME = re.compile(r"<\d+:\d\d[:.\d]*>")
_TIMING = r"(?:<\d+:\d\d[:.\d]*>|</?c(?:\.[^<>\s]*)?>)"
# A line of nothing else goes as a whole, because an empty line would end the cue.
_OF_A_WORD = re.compile(rf"(?<![^\r\n])(?:[ \t]*{_TIMING})+[ \t]*(?:\r\n?|\n|\Z)|{_TIMING}")
_LETTERS = r"[0-9A-Za-z_\u00aa-\u058f]+"  # of scripts with spaces between words
# A word with a mark inside stays whole, because its parts would be decoded as separate words.
_KEPT = re.compile(rf"(?m)\b{_LETTERS}(?:{_MARK}+{_LETTERS})+|{_MARK}")
# Punctuation beside a mark, up to white space, stays too: the comma in "<i>Yes</i>, and".
_LOOSE, _SPACE = re.compile(r"\W*\s"), re.compile(r"\s*")


Spans = list[tuple[int, int]]


def find_words(text: str, suffix: str) -> tuple[Spans, Spans, str]:
    """Each stretch of words in a subtitle file, in order, its cue, and the masked file.

    A change of speaker starts a new stretch, and so does a tag, because models garble tags.
    """
    masked = mask(text, subtitles=True)
    times = list(_TIMES.finditer(masked))
    if suffix == ".vtt" and not text.removeprefix("\ufeff").startswith("WEBVTT"):
        raise UserError('a .vtt file begins with "WEBVTT"; this one does not: is it an .srt file?')
    if suffix == ".srt" and not times:
        raise UserError("an .srt file has times, as in 00:00:01,000 --> 00:00:04,000: none is here")
    words, cues, characters = Spans(), Spans(), list(masked)
    for time, end in zip(times, [*(time.start() for time in times), len(text)][1:], strict=True):
        for block in _BLOCK.finditer(masked, time.end(), end):
            if suffix == ".vtt" and block.start() > time.end():
                break  # an empty line ends a cue; but sloppy .srt files have empty lines in cues
            if _INLINE_TIME.search(block[0]):
                for tag in _OF_A_WORD.finditer(text, *block.span()):
                    characters[slice(*tag.span())] = GONE * len(tag[0])
            cue = "".join(characters[slice(*block.span())])
            words += ((block.start() + a, block.start() + b) for a, b in _words(cue))
            cues += [block.span()] * (len(words) - len(cues))
    return words, cues, "".join(characters)


def _words(block: str) -> Iterator[tuple[int, int]]:
    kept = [(0, 0), *(mark.span() for mark in _KEPT.finditer(block)), (len(block), len(block))]
    for (_, start), (end, _) in pairwise(kept):
        before, after = (_LOOSE if 0 < at < len(block) else _SPACE for at in (start, end))
        if gap := before.match(block, start, end):
            start = gap.end()
        if gap := after.match(block[start:end][::-1]):
            end -= gap.end()
        if any(map(str.isalpha, block[start:end])):
            yield start, end


def laid_out(gaps: Sequence[str], turns: Sequence[tuple[str, str]], newline: str) -> str:
    """Breaks the answers of a cue into lines, up to the end of the last turn.

    Args:
        gaps: what stands before, between and behind the turns; its line breaks stay.
        turns: the source and the answer of each turn.
        newline: a line break, for a line that is too wide although its source has none.
    """
    sources, answers, breaks = [""], [""], list[str]()
    for gap, (source, answer) in zip(gaps, turns, strict=False):
        if not sources[-1] or _BREAK.search(gap):
            gap = gap.replace(" ", GLUE)  # a dash or a name stays on the line of its turn
        first, *others = _BREAK.split(gap)
        breaks += _BREAK.findall(gap)
        for lines, text in (sources, source), (answers, unwrapped(answer)):
            lines[-1] += first
            lines += others
            lines[-1] += text
    tail = GLUE * _width(_BREAK.split(gaps[-1])[0])
    sources[-1], answers[-1] = sources[-1] + tail, answers[-1] + tail
    longest = max(_width(line) for source in sources for line in _BREAK.split(source))
    laid = map(rewrapped, sources, answers, repeat(newline), repeat(longest))
    joined = "".join(line + gap for line, gap in zip(laid, [*breaks, ""], strict=True))
    return joined.rstrip(GLUE).replace(GLUE, " ")


def unwrapped(source: str) -> str:
    return _BREAK.sub(" ", source)


def rewrapped(source: str, answer: str, newline: str = "", longest: int = 0) -> str:
    """Breaks an answer into lines like its source.

    The answer gets the source's number of lines, of about equal width, if it has enough words. It
    gets more if a line would be wider than the source's lines, `longest` and `LINE_WIDTH`, but a
    source without a line break only if there is a `newline` to use.
    """
    breaks = _BREAK.findall(source) or [newline]
    if not breaks[0]:
        return answer
    answer = unwrapped(answer)
    if answer == unwrapped(source):
        return source
    lines = _BREAK.split(source)
    longest = max(LINE_WIDTH, longest, *map(_width, lines))
    first, *others = _lines(answer, len(lines), longest)
    gaps = chain(breaks, repeat(breaks[-1]))
    return first + "".join(gap + line for line, gap in zip(others, gaps, strict=False))


def _lines(text: str, least: int, longest: int) -> list[str]:
    """Breaks a text into `least` lines, or more if one would be wider than `longest`."""
    phrases, words = (_units(unit, _visible(text)) for unit in (_PHRASE, _WORD))
    count = max(least, len(_line_starts(words, 1, longest)))
    fits = len(phrases) >= count >= len(_line_starts(phrases, 1, longest))
    units = phrases if fits and all(width <= longest for *_, width in phrases) else words
    enough = lambda width: len(_line_starts(units, count, width)) <= count  # noqa: E731
    narrowest = bisect_left(range(sum(width for _, width, _ in units)), True, key=enough)
    starts = _line_starts(units, count, narrowest)
    first, *lines = (text[a:b] for a, b in pairwise([0, *starts[1:], len(text)]))
    return [first, *(line.lstrip(" \t") for line in lines)]


def _units(unit: re.Pattern[str], text: str) -> list[tuple[int, int, int]]:
    """Where each unit starts, its width, and its width at the start of a line."""
    found = ((match.start(), match[0]) for match in unit.finditer(text))
    return [(start, _width(word), _width(word.lstrip(" \t"))) for start, word in found]


def _line_starts(units: list[tuple[int, int, int]], count: int, limit: int) -> list[int]:
    starts, length = [0], 0
    for n, (start, width, at_start) in enumerate(units):
        length += width
        if n and (length > limit or len(units) - n <= count - len(starts)):
            starts.append(start)
            length = at_start
    return starts


def _visible(text: str) -> str:
    """A text, as long as before, with what tags (nothing) and references (a character) show."""
    hidden = lambda part: ("x" if part[0][0] == "&" else REST).ljust(len(part[0]), REST)  # noqa: E731
    return _HIDDEN.sub(hidden, text)


def _width(text: str) -> int:
    """Columns of a text on the screen: two for a Chinese character, none for an accent or a tag."""
    shown = _visible(text).replace(REST, "").replace(GLUE, " ")
    visible = [char for char in shown if unicodedata.category(char) not in ("Mn", "Me", "Cf")]
    return len(visible) + sum(unicodedata.east_asian_width(char) in "FW" for char in visible)
