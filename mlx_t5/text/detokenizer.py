"""Decodes tokens to text, all together or one by one; compares two vocabularies.

T5's tokenizers are sentencepiece unigram models. Those of mT5, umT5 and MADLAD spell unknown
characters in byte tokens such as "<0xE4>". ByT5's tokenizer spells everything in bytes.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Sequence
from typing import Any

from mlx_t5.errors import UserError

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of tokens, without special tokens and without "cleaning up" spaces."""
    return tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def same_vocabulary(a: Any, b: Any) -> None:
    """Checks that two tokenizers have the same token for every id that is in both vocabularies.

    Raises:
        UserError: the tokens differ; the message shows the first difference.
    """
    first, second = ({i: token for token, i in t.get_vocab().items()} for t in (a, b))
    for i in sorted(first.keys() & second.keys()):
        if first[i] != second[i]:
            raise UserError(
                f"vocabularies differ: token {i} is {first[i]!r} in the target and {second[i]!r} "
                "in the draft; use a draft model with the target's tokenizer"
            )


class StreamingDetokenizer:
    """Decodes a growing list of tokens to pieces of text that later tokens do not change.

    The pieces, joined, equal `decode` of all tokens. The text of byte tokens is held back while the
    next token may still change its characters.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # The last visible token, decoded before the next tokens so that their space is kept.
        self._context: list[int] = []
        self._pending: list[int] = []
        spelled = type(tokenizer).__name__ == "ByT5Tokenizer"
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore") if spelled else None

    def fork(self) -> StreamingDetokenizer:
        """Returns an independent copy that has decoded the same tokens."""
        other = copy.copy(self)
        other._context, other._pending = list(self._context), list(self._pending)
        if self._utf8:
            other._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")
            other._utf8.setstate(self._utf8.getstate())
        return other

    def add(self, token: int) -> str:
        """Adds a token; returns the text that becomes final, which may be empty."""
        if self._utf8:
            return self._utf8.decode(self._spelling(token))
        # Decoded twice, so that a single space shows; a special or unknown token has no text.
        if not decode(self._tokenizer, [token, token]):
            return ""
        self._pending.append(token)
        if _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token)):
            return ""
        return self._flush()

    def peek(self) -> str:
        """Returns the text that `finish` would return now, without ending the text."""
        return "" if self._utf8 or not self._pending else self._rest()

    def finish(self) -> str:
        """Ends the text; returns the rest that was held back."""
        return self._utf8.decode(b"", final=True) if self._utf8 else self._flush()

    def _rest(self) -> str:
        known = decode(self._tokenizer, self._context)
        return decode(self._tokenizer, self._context + self._pending)[len(known) :]

    def _flush(self) -> str:
        text = self._rest()
        self._context, self._pending = self._pending[-1:] or self._context, []
        return text

    def _spelling(self, token: int) -> bytes:
        """Returns the bytes that a ByT5 token stands for; b"" for a special token."""
        piece = self._tokenizer.convert_ids_to_tokens([token], skip_special_tokens=True)
        if not piece:
            return b""
        return bytes([ord(piece[0])]) if len(piece[0]) == 1 else piece[0].encode()
