r"""How a token looks by itself, for log-probabilities.

A byte is no text unless it is ASCII, so its token is named as OpenAI's API does it, `\xe4`, and
`bytes` has it. The bytes of all tokens of a text, joined, are the text in UTF-8.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Spelling(NamedTuple):
    """A token by itself.

    Attributes:
        text: for people; a leading space is included. "" of an id that has none.
        bytes: what it adds to a text; None if nothing, as special tokens.
    """

    text: str
    bytes: list[int] | None


class Speller:
    """Spells a tokenizer's tokens."""

    def __init__(self, tokenizer: Any):
        """Spells the tokens of this tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._all_bytes = type(tokenizer).__name__ == "ByT5Tokenizer"

    def __call__(self, token: int) -> Spelling:
        """How an id looks."""
        # Models have more ids than tokenizers, and any of them may be among the likeliest.
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if token in self._special or not name:
            return Spelling(name, None)
        if self._all_bytes and len(name) == 1:
            return _of_byte(ord(name))
        if found := BYTE.fullmatch(name):
            return _of_byte(int(found.group(1), 16))
        text = name.replace("▁", " ")
        return Spelling(text, list(text.encode()))


def _of_byte(value: int) -> Spelling:
    return Spelling(chr(value) if value < 128 else f"\\x{value:02x}", [value])
