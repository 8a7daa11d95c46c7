"""Masks what is not a word, so that words are found although marks, names and references stay.

A masked text is as long as its source, so that positions in one are positions in the other.

    source  Bob: don&#39;t<br>go     a speaker's name is white space, <br> ends a line, and a
    masked  ␝␝␝␝ don'····t   ⏎go     character reference is its character, then "the rest of it"
"""

from __future__ import annotations

import html
import re
from collections import Counter

NAME, CR, GONE = "\x1d", "\x1e", "\x1f"  # white space for Python: a name, CR of CRLF, inline times
REST = "\ufdd0"  # of a character reference; no character of any text, no letter, no white space
LEAST_TURNS = 3  # lines that must begin with the same "Name: "

_REFERENCE = re.compile(r"&(?:[A-Za-z][A-Za-z0-9]{1,30}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_LINE_BREAK = re.compile(r"<[bB][rR] ?/? ?>")
_WORDS = r"[^\W\d_](?:[\w.'’&#()-]| (?=[\w#(])){0,29}"
_SPEAKER = re.compile(
    rf"(?m)^((?:[^\S\n]|\ufeff|<[/\w][^<>]*>|\{{\\[^{{}}]*\}}|[-‐-—>]{REST}*)*)"
    rf"(\[({_WORDS})\](?::|(?=[^\S\n]+\S))|({_WORDS})(?::(?=\s|\Z)|：))"
)


def mask(text: str, subtitles: bool = False) -> str:
    """Masks a text; in subtitles `[Name]` and `MAN:` are names even if a single turn has them."""
    text = text.replace(NAME, " ").replace(GONE, " ")
    text = text.replace("\r\n", CR + "\n").replace("\r", "\n")
    text = _LINE_BREAK.sub(lambda br: " " * (len(br[0]) - 1) + "\n", text)
    text = _REFERENCE.sub(_masked, text)
    turns = Counter(speaker[2] for speaker in _SPEAKER.finditer(text))

    def named(speaker: re.Match[str]) -> str:
        name = speaker[3] or speaker[4]
        sure = subtitles and (speaker[3] or (name.isupper() and len(name) > 1))
        known = sure or turns[speaker[2]] >= LEAST_TURNS
        if not known or any(word[0].islower() for word in name.split()):
            return speaker[0]
        return speaker[1] + NAME * len(speaker[2])

    return _SPEAKER.sub(named, text)


def unescaped(text: str) -> str:
    return _REFERENCE.sub(lambda reference: _character(reference[0]), text)


def _character(reference: str) -> str:
    character = html.unescape(reference)
    return " " if character.isspace() else character


def _masked(reference: re.Match[str]) -> str:
    character, length = _character(reference[0]), len(reference[0])
    return " " * length if character == " " else character.ljust(length, REST)
