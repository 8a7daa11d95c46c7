"""Finds the words of SubRip (.srt) and WebVTT (.vtt) subtitles, and breaks answers into lines.

Only the words of the cues are decoded. Numbers, times, tags, music notes and the names of speakers
and marks of their turns stay as they are, so a file whose answers equal its words is reproduced
byte for byte, but for the times inside of cues (YouTube's), which no translation can keep.

Time and memory grow linearly with the file's size, because no regular expression here scans the
same text again from every position.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, pairwise, repeat

from mlx_t5.errors import UserError
from mlx_t5.text.masking import CR, GONE, NAME, REST, mask

LINE_CHARACTERS = 42  # a line may have so many, even if the source's lines are shorter

_BREAK = re.compile(r"(?<![ \t])[ \t]*(?:\r\n?|\n|<[bB][rR] ?/? ?>)[ \t]*")
_HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_OPENING = "「『（〈《【〔［"
# A unit that no line break divides: a word, or a character of a script without spaces. A mark that
# would begin a list or a speaker's turn stays behind the word before it. No-break spaces are parts
# of words.
_UNIT = re.compile(
    rf"[ \t]*(?:[{_OPENING}]*[{_HAN}](?:[^\w\s{_OPENING}]|ー)*|[^ \t{_HAN}{_OPENING}]+"
    rf"|[{_OPENING}]+)(?: (?:[-–—+*>]+|\d{{1,9}}[.)])(?= |\Z))*"
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


def find_words(text: str, suffix: str) -> tuple[list[tuple[int, int]], str]:
    """Start and end of each stretch of words in a subtitle file, in order, and the masked file.

    A change of speaker starts a new stretch, and so does a tag, because models garble tags.
    """
    masked = mask(text, subtitles=True)
    times = list(_TIMES.finditer(masked))
    if suffix == ".vtt" and not text.removeprefix("\ufeff").startswith("WEBVTT"):
        raise UserError('a .vtt file begins with "WEBVTT"; this one does not: is it an .srt file?')
    if suffix == ".srt" and not times:
        raise UserError("an .srt file has times, as in 00:00:01,000 --> 00:00:04,000: none is here")
    words, characters = list[tuple[int, int]](), list(masked)
    for time, end in zip(times, [*(time.start() for time in times), len(text)][1:], strict=True):
        for block in _BLOCK.finditer(masked, time.end(), end):
            if suffix == ".vtt" and block.start() > time.end():
                break  # an empty line ends a cue; but sloppy .srt files have empty lines in cues
            if _INLINE_TIME.search(block[0]):
                for tag in _OF_A_WORD.finditer(text, *block.span()):
                    characters[slice(*tag.span())] = GONE * len(tag[0])
            cue = "".join(characters[slice(*block.span())])
            words += ((block.start() + a, block.start() + b) for a, b in _words(cue))
    return words, "".join(characters)


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


def unwrapped(source: str) -> str:
    return _BREAK.sub(" ", source)


def rewrapped(source: str, answer: str) -> str:
    """Breaks an answer into lines like its source.

    The answer gets the source's number of lines, of about equal length, if it has enough words. It
    gets more if a line would be longer than the source's longest line and `LINE_CHARACTERS`.
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
    starts, length = [0], 0
    for n, unit in enumerate(units):
        length += len(unit)
        if n and (length > limit or len(units) - n <= count - len(starts)):
            starts.append(n)
            length = len(unit.lstrip(" \t"))
    return starts
