"""Cuts a text into pieces that a T5 decodes well, and joins the decoded answers into one text.

    text    between  piece   between  piece   …  between
    joined  between  answer  between  answer  …  between

The text between the pieces is kept byte for byte: white space, line breaks, empty lines, the marks
of list items, the names of speakers, and passages without a letter. Only the pieces are decoded,
each after the task's prefix. They are found in the masked text (masking.py), where positions stay.

The pieces are sentences (sentences.py) of a paragraph, which is one line, or several lines of
hard-wrapped text: see `_is_hard_wrapped`.

Nothing here depends on a model: the caller passes a function that counts tokens.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise, takewhile

from mlx_t5.errors import UserError
from mlx_t5.settings import SUBTITLES
from mlx_t5.text.languages import source_language_of
from mlx_t5.text.masking import GONE, NAME, REST, mask, unescaped
from mlx_t5.text.prompts import DocumentOptions, guessed_prefix_end
from mlx_t5.text.sentences import LONGEST_SENTENCE, ORDINALS, sentence_spans
from mlx_t5.text.subtitles import find_words, laid_out, rewrapped, unwrapped

MOST_ACCENTS = 32  # combining accents that stay with their letter if a word is cut
WRAPPED_WIDTHS = range(40, 121)  # characters of the longest line of hard-wrapped prose

_LINE = re.compile(r"[^\n]+")
_ITEM = re.compile(rf"\s*(?:{NAME}+|(?:[-*+•‣–—]|\d{{1,3}}[.)])[ \t]+(?=[\S{NAME}]))")
_WORD = re.compile(r"\s*([\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]|\S+)")  # one Chinese character
# A sentence is not cut at a comma between digits, but at any comma of languages without spaces.
_CLAUSE = re.compile(r"[,;:!?…–—](?=\s)|[、，；：،؛。！？]")
_SPACE = re.compile(r"\s+")
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# Thai, Lao, Burmese and Khmer write vowels before and behind their consonant, and stack consonants.
_BEHIND = "ะ-ฺๅ-๎\u0eb0-\u0ebc\u0ec6-\u0ece\u102b-\u103e\u1056-\u109d\u17b4-\u17dd々ー"
_BETWEEN = re.compile(
    rf"(?<=[{_SPACELESS}])(?<![เ-ไເ-ໄ\u1039\u17d2])(?=[{_SPACELESS}])(?![{_BEHIND}])"
)
_ADDRESS = re.compile(r"(?:https?://|www\.)[^\s<>\"]*\w/?|(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_MADLAD = r"<2[\w-]+>"

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """The characters [start, end) of a text, decoded as one prompt.

    Attributes:
        cut: whether the piece is only a part of a sentence, line or cue that was too long.
        stretch: index of the stretch of words in which the piece lies; see `find_words`.
    """

    start: int
    end: int
    cut: bool = False
    stretch: int = 0


class Document:
    """A text and its pieces.

    Attributes:
        text: the whole text.
        prefix: the task's prefix, from the options or from the beginning of the text.
        start: where the document begins, after a prefix that was found in the text.
        doubtful: the beginning of the text, if it looks like a prefix of an unknown task; it is
            decoded as text. "" if there is none.
        pieces: the pieces cut so far, in order.
    """

    def __init__(
        self,
        text: str,
        options: DocumentOptions,
        tokens: Callable[[str], int],
        n_positions: int | None = None,
        prefixes: Sequence[str] = (),
    ) -> None:
        if not isinstance(text, str):
            raise UserError(f"split is {options.split!r}, which needs a text, not token ids")
        self.text, self.prefix, self.start, self.doubtful = text, options.prefix or "", 0, ""
        mark = 1 if text.startswith("\ufeff") else 0  # byte order mark
        if options.prefix is None and not options.file_type:
            known = [_MADLAD]
            for prefix in sorted(prefixes, key=len, reverse=True):
                space = r"(?=\s)" if prefix[-1].isspace() else ""
                known.append(re.escape(prefix.strip()) + space)
            if match := re.compile(rf"\s*(?:{'|'.join(known)})\s*").match(text, mark):
                self.start = match.end()
                self.prefix = text[mark : self.start]
            else:
                self.doubtful = text[mark:][: guessed_prefix_end(text[mark:])].strip()
        self.pieces: list[Piece] = []
        self._split, self._tokens, self._file_type = options.split, tokens, options.file_type
        self._limit = options.max_source_tokens or n_positions
        self._turns: list[Span] | None = None
        self._newline = next((end for end in ("\r\n", "\n") if end in text), "\r")
        self._masked = text[: self.start or mark] + mask(text[self.start or mark :])
        if self._file_type in SUBTITLES:
            self._turns, self._cues, self._masked = find_words(text, self._file_type)
        self._language = options.source_language or source_language_of(self.prefix)
        if self._limit and (used := tokens(self.prefix + "a")) > self._limit:
            needs = f"the prefix and one letter take {used} tokens"
            raise UserError(f"max_source_tokens is {self._limit}, but {needs}; raise it")

    def cut(self) -> Iterator[Piece]:
        for n, stretch in enumerate(self._stretches()):
            units: Iterable[Span] = [stretch]
            if self._split == "sentences":
                units = sentence_spans(self._masked, *stretch, self._language)
            for unit in units:
                for piece in self._fitting(*unit, n):
                    self.pieces.append(piece)
                    yield piece

    def source(self, piece: Piece) -> str:
        return unescaped(unwrapped(self._kept(piece.start, piece.end)))

    def prompt(self, piece: Piece) -> str:
        return self.prefix + self.source(piece)

    def loses_address(self, piece: Piece, answer: str) -> bool:
        """Whether an answer lacks a URL or an e-mail address of its source, letter for letter."""
        return not all(found in answer for found in _ADDRESS.findall(self.source(piece)))

    def answered(self, piece: Piece, answer: str | None) -> str:
        source = self._kept(piece.start, piece.end)
        ends_cue = self._turns is not None and not (answer or "").strip()  # as an empty line
        if answer is None or answer == self.source(piece) or ends_cue:
            return source
        escapes = self._file_type == ".vtt"
        return rewrapped(source, html.escape(answer, quote=False) if escapes else answer)

    def before(self, i: int) -> str:
        """The text between piece i - 1 and piece i; from `start` for the first, to the end last."""
        start = self.pieces[i - 1].end if i else self.start
        return self._kept(start, self.pieces[i].start if i < len(self.pieces) else len(self.text))

    def part(self, i: int, texts: Sequence[str]) -> str:
        """Piece i's part of the joined document; `texts` replace the pieces 0 to i."""
        if self._turns is None:
            return self.before(i) + texts[i]
        # A cue is broken into lines as a whole, so its last piece stands for all of it.
        first, cue = i, self._cues[self.pieces[i].stretch]
        if i + 1 < len(self.pieces) and self._cues[self.pieces[i + 1].stretch] == cue:
            return ""
        while first and self._cues[self.pieces[first - 1].stretch] == cue:
            first -= 1
        # The pieces of a stretch of words are one turn; the text between two turns stays as it is.
        gaps, turns, end = list[str](), list[tuple[str, str]](), cue[0]
        for _, turn in groupby(range(first, i + 1), lambda n: self.pieces[n].stretch):
            n, *rest = turn
            gaps.append(self._kept(end, self.pieces[n].start))
            end = self.pieces[n + len(rest)].end
            answer = "".join([texts[n], *(self.before(m) + texts[m] for m in rest)])
            turns.append((self._kept(self.pieces[n].start, end), answer))
        lines = laid_out([*gaps, self._kept(end, cue[1])], turns, self._newline)
        return self.before(first).removesuffix(gaps[0]) + lines

    def _kept(self, start: int, end: int) -> str:
        pairs = zip(self.text[start:end], self._masked[start:end], strict=True)
        return "".join(char for char, mark in pairs if mark != GONE)

    def _stretches(self) -> Iterable[Span]:
        if self._turns is not None:
            return self._turns
        start = self.start or int(self.text.startswith("\ufeff"))
        if self._split == "none":
            return [(start, len(self.text))]
        lines = (line.span() for line in _LINE.finditer(self._masked, start))
        if self._split == "sentences":
            return _paragraphs(self._masked, lines, self._language)
        return ((max(a, self._masked.rfind(NAME, a, b) + 1), b) for a, b in lines)

    def _fitting(self, start: int, end: int, stretch: int, cut: bool = False) -> Iterator[Piece]:
        unit = self._masked[start:end]
        start, end = end - len(unit.lstrip()), start + len(unit.rstrip())
        if not any(map(str.isalpha, unit)):
            return
        piece = Piece(start, end, cut, stretch)
        endless = self._split != "none" and end - start > LONGEST_SENTENCE
        too_long = endless or self._limit and self._tokens(self.prompt(piece)) > self._limit
        if end - start > 1 and too_long:
            middle = _cut_point(self._masked, start, end)
            yield from self._fitting(start, middle, stretch, True)
            yield from self._fitting(middle, end, stretch, True)
        else:
            yield piece


def _paragraphs(text: str, lines: Iterable[Span], language: str) -> Iterator[Span]:
    block: list[Span] = []
    for first, last in chain(lines, [(len(text), len(text))]):
        blank = not text[first:last].strip()
        adjacent = block and text[block[-1][1] : first] == "\n"
        if blank or not adjacent or _item(text, first, last, language):
            wrapped = _is_hard_wrapped([text[begin:end] for begin, end in block])
            for begin, end in [(block[0][0], block[-1][1])] if wrapped else block:
                yield begin + len(_item(text, begin, end, language)), end
            block = []
        block += [] if blank else [(first, last)]


def _item(text: str, start: int, end: int, language: str) -> str:
    """The mark of a list item; "" for an ordinal, as in "5. května"."""
    item = match[0] if (match := _ITEM.match(text, start, end)) else ""
    numbered = item.rstrip().endswith(".")
    ordinal = numbered and language in ORDINALS and text[start + len(item)].islower()
    return "" if ordinal else item


def _is_hard_wrapped(lines: Sequence[str]) -> bool:
    """Whether the next line's first word never had room, and some line continues a sentence."""
    if len(lines) < 2:
        return False
    width = max(len(line.rstrip()) for line in lines)
    words = [word[1] if (word := _WORD.match(line)) else "" for line in lines[1:]]
    ends = [len(line.rstrip()) + 1 + len(word) for line, word in zip(lines, words, strict=False)]
    continued = any(word[:1].isalpha() and not word[:1].isupper() for word in words)
    return width in WRAPPED_WIDTHS and min(ends) > width and continued


def smaller_parts(text: str) -> list[Span]:
    """The parts of a text between its clause marks; if there are none, its halves by words."""
    between_words = [_cut_point(text, 0, len(text))]
    if not (_SPACE.search(text.strip()) or _BETWEEN.search(text)):
        between_words = []
    for ends in [match.end() for match in _CLAUSE.finditer(text)], between_words:
        parts = list[Span]()
        for start, end in pairwise([0, *ends, len(text)]):
            part = text[start:end]
            if any(map(str.isalpha, part)):
                parts.append((end - len(part.lstrip()), start + len(part.rstrip())))
        if len(parts) > 1:
            return parts
    return []


def _cut_point(text: str, start: int, end: int) -> int:
    """Where to cut a text: in its middle half, or where that is a single word, at any space."""
    quarter = max(1, (end - start) // 4)
    for pattern, margin in (_CLAUSE, quarter), (_SPACE, quarter), (_BETWEEN, quarter), (_SPACE, 1):
        ends = [match.end() for match in pattern.finditer(text, start, end - margin + 1)]
        ends = [at for at in ends if start + margin <= at <= end - margin and text[at] != REST]
        if ends:
            return min(ends, key=lambda at: abs(2 * at - start - end))
    middle = (start + end) // 2
    behind = text[middle : min(end - 1, middle + MOST_ACCENTS)]
    # An accent (M), or the rest of a reference, stays with the character before it.
    stays = lambda char: char == REST or unicodedata.category(char)[0] == "M"  # noqa: E731
    return middle + len(list(takewhile(stays, behind)))
