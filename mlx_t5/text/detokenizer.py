"""Decodes tokens to text, all together or one by one, and ends a text before a stop string.

Tokens need not end where characters end. Byte-level BPE and ByT5 spell all text in bytes, and the
vocabularies of mT5, umT5 and MADLAD have byte tokens such as "<0xE4>" for unknown characters.

Decoding ends with the first token that completes a stop string. The text is cut before the stop
string. The stop string's tokens are kept, because the first and the last of these tokens may also
contain other text. All of this happens in Python, after a step's tokens have arrived.

Text that may be the beginning of a stop string is held back, so that a stream never shows a part of
a stop string. Only the held-back text is searched, because a stop string cannot begin in text that
was released. So the work per token does not grow with the length of the text.

Special tokens are no part of a text, but a stop string may name them ("<extra_id_1>"). So each of
those that are named is searched as one character that no text has, and left out of what is shown.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mlx_t5.text.tokenizer import CLEANS

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# What loses its spaces, in this order, if `CLEANS` is true in tokenizer_config.json.
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# The end of a text that the next characters may make one of these: no other begins before it.
_OPEN_END = re.compile(f"(?: [{''.join({*''.join(_SPACED)})}]*)?$")


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return _cleaner(tokenizer)(_spelled(tokenizer, tokens))


def _spelled(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True, **{CLEANS: False})


def _cleaner(tokenizer: Any) -> Callable[[str], str]:
    """`cleaned`, or `str` if texts stay as they are, like all of BPE in transformers."""
    model = getattr(getattr(tokenizer, "_tokenizer", None), "model", None)
    plain = type(model).__name__ == "BPE" or not getattr(tokenizer, CLEANS, False)
    return str if plain else cleaned


def cleaned(text: str) -> str:
    for part in _SPACED:
        text = text.replace(part, part.strip())
    return text


def byte_speller(tokenizer: Any) -> Callable[[int], bytes] | None:
    """Spells a token in bytes, for ByT5 and byte-level BPE; special tokens have no bytes."""

    def byt5(token: int) -> bytes:
        name = "".join(tokenizer.convert_ids_to_tokens([token], skip_special_tokens=True))
        return bytes([ord(name)]) if len(name) == 1 else name.encode()

    def byte_level(token: int) -> bytes:
        name = tokenizer.convert_ids_to_tokens(token) if _spelled(tokenizer, [token]) else ""
        letters = _byte_level_alphabet()
        return bytes(letters[c] for c in name) if letters.keys() >= set(name) else name.encode()

    if type(tokenizer).__name__ == "ByT5Tokenizer":
        return byt5
    # An attribute of our own class and of transformers'.
    decoder = getattr(getattr(tokenizer, "_tokenizer", None), "decoder", None)
    return byte_level if type(decoder).__name__ == "ByteLevel" else None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    printable = [ord(letter) for letter in letters if ord(letter) < 256]
    # The other letters stand for the other bytes, in order.
    return dict(zip(letters, [*printable, *sorted({*range(256)} - {*printable})], strict=True))


class StreamingDetokenizer:
    """Decodes a growing list of tokens to segments of text that later tokens do not change.

    The segments, joined, equal `decode` of all tokens. The text of byte tokens is held back while
    the next token may still change its characters, and a space while it may still be cleaned away.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # The last visible token, decoded before the next tokens so that their space is kept.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._open = ""  # text that is not cleaned yet
        self._clean, self._spell = _cleaner(tokenizer), byte_speller(tokenizer)
        # ByT5's tokenizer drops bytes that are no UTF-8.
        errors = "ignore" if type(tokenizer).__name__ == "ByT5Tokenizer" else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def fork(self) -> StreamingDetokenizer:
        other = copy.copy(self)
        other._context, other._pending = list(self._context), list(self._pending)
        other._utf8 = type(self._utf8)(self._utf8.errors)
        other._utf8.setstate(self._utf8.getstate())
        return other

    def add(self, token: int, mark: str = "") -> str:
        """The text that no later token changes; `mark` is shown for a special token."""
        if mark:
            text = self._waiting() + mark
            self._pending = []
        else:
            text = self._added(token)
        text = self._open + text
        self._open = _OPEN_END.findall(text)[0] if self._clean is cleaned else ""
        return self._clean(text.removesuffix(self._open))

    def _added(self, token: int) -> str:
        if self._spell:
            return self._utf8.decode(self._spell(token))
        # Decoded twice, so that a single space shows; a special or unknown token has no text.
        if not _spelled(self._tokenizer, [token, token]):
            return ""
        self._pending.append(token)
        if BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token)):
            return ""
        text = self._waiting()
        if text.endswith("\ufffd"):
            return ""
        self._context, self._pending = [token], []
        return text

    def _waiting(self) -> str:
        if not self._pending:
            return ""
        known = _spelled(self._tokenizer, self._context)
        return _spelled(self._tokenizer, self._context + self._pending)[len(known) :]

    def peek(self) -> str:
        """The text held back as it is if no token follows, without half a character."""
        return self._clean(self._open + self._waiting())

    def finish(self) -> str:
        """The text held back once all tokens are known."""
        return self._clean(self._open + self._waiting() + self._utf8.decode(b"", final=True))


class TextWatch:
    """Reads the text of one row while it grows, up to a stop string.

    Attributes:
        segments: for each token read, the text that it released, which later tokens cannot change.
        rest: the text after the last piece, released by `finish`.
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._marks: dict[int, str] = {}  # by token
        self._stop = set(stop)
        if stop:
            marked = list(stop)
            for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
                if added.special and any(added.content in text for text in stop):
                    # Half of a surrogate pair: no tokenizer writes it.
                    mark = self._marks[token] = chr(0xD800 + len(self._marks))
                    marked = [text.replace(added.content, mark) for text in marked]
            self._stop.update(marked)
        self._hidden = str.maketrans(dict.fromkeys(self._marks.values()))
        self._held = ""
        self.segments: list[str] = []
        self.rest = ""
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self.segments) + self.rest

    def fork(self) -> TextWatch:
        other = copy.copy(self)
        other._detokenizer, other.segments = self._detokenizer.fork(), list(self.segments)
        return other

    def take(self, tokens: Sequence[int]) -> int:
        """Reads tokens up to the one that completes a stop string; returns their number."""
        if not self._stop:
            self.segments += map(self._detokenizer.add, tokens)
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            self._held += self._detokenizer.add(token, self._marks.get(token, ""))
            # The held-back text if this token were the last.
            ending = self._held + self._detokenizer.peek()
            stops = [index for index in map(ending.find, self._stop) if index >= 0]
            if stops:
                self.segments.append(ending[: min(stops)].translate(self._hidden))
                self.stopped = True
                return count
            certain = len(self._held) - self._beginning()
            self.segments.append(self._held[:certain].translate(self._hidden))
            self._held = self._held[certain:]
        return len(tokens)

    def finish(self) -> None:
        if not self.stopped:
            self.rest = (self._held + self._detokenizer.finish()).translate(self._hidden)

    def _beginning(self) -> int:
        """The length of the longest suffix of `_held` that may begin a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
