"""Reads a text while it is written, and ends it where a stop string begins.

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

import copy
from collections.abc import Sequence
from typing import Any

from mlx_t5.text.detokenizer import StreamingDetokenizer


class TextWatch:
    """Reads the text of one row while it grows, up to a stop string.

    Attributes:
        pieces: for each token read, the text that it released, which later tokens cannot change.
        rest: the text after the last piece, released by `finish`.
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._marks: dict[int, str] = {}  # by token
        marked = list(stop)
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if stop else ():
            if added.special and any(added.content in text for text in stop):
                # Half of a surrogate pair: no tokenizer writes it.
                mark = self._marks[token] = chr(0xD800 + len(self._marks))
                marked = [text.replace(added.content, mark) for text in marked]
        self._stop = {*stop, *marked}
        self._held = ""
        self.pieces: list[str] = []
        self.rest = ""
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self.pieces) + self.rest

    def fork(self) -> TextWatch:
        other = copy.copy(self)
        other._detokenizer, other.pieces = self._detokenizer.fork(), list(self.pieces)
        return other

    def take(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens, 1):
            self._held += self._detokenizer.add(token, self._marks.get(token, ""))
            # The held-back text if this token were the last.
            ending = self._held + self._detokenizer.peek()
            stops = [index for index in map(ending.find, self._stop) if index >= 0]
            if stops:
                self.pieces.append(self._shown(ending[: min(stops)]))
                self.stopped = True
                return count
            certain = len(self._held) - self._beginning()
            self.pieces.append(self._shown(self._held[:certain]))
            self._held = self._held[certain:]
        return len(tokens)

    def finish(self) -> None:
        if not self.stopped:
            self.rest = self._shown(self._held + self._detokenizer.finish())

    def _shown(self, text: str) -> str:
        return text.translate(dict.fromkeys(map(ord, self._marks.values())))

    def _beginning(self) -> int:
        """The length of the longest suffix of `_held` that may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
