"""Decodes tokens to text, all together or one by one; compares two vocabularies.

Tokens need not end where characters end. Byte-level BPE and ByT5 spell all text in bytes, and the
vocabularies of mT5, umT5 and MADLAD have byte tokens such as "<0xE4>" for unknown characters.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.text.added_tokens import CLEANS

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


def same_vocabulary(a: Any, b: Any) -> None:
    """Checks that a target's and a draft's tokenizer agree; None is a missing one, and agrees."""
    if a is None or b is None:
        return
    first, second = ({i: token for token, i in t.get_vocab().items()} for t in (a, b))
    for i in sorted(first.keys() & second.keys()):
        if first[i] != second[i]:
            raise UserError(
                f"vocabularies differ: token {i} is {first[i]!r} in the target and {second[i]!r} "
                "in the draft; use a draft model with the target's tokenizer"
            )


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
    """Decodes a growing list of tokens to pieces of text that later tokens do not change.

    The pieces, joined, equal `decode` of all tokens. The text of byte tokens is held back while the
    next token may still change its characters, and a space while it may still be cleaned away.
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
        text = self._open + (self._waiting() + mark if mark else self._added(token))
        if mark:
            self._pending = []
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

    def peek(self, more: str = "") -> str:
        """The text held back as it is if no token follows, without half a character."""
        return self._clean(self._open + self._waiting() + more)

    def finish(self) -> str:
        return self.peek(self._utf8.decode(b"", final=True))
