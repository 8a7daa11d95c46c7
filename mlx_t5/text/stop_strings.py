"""Reads a text while it is written, and ends it where a stop string begins.

Decoding ends with the first token whose text, joined to all before it, contains a stop string. The
text is cut in front of it; the tokens are kept, as the last one may have brought more than the stop
string, and the first of it less. All of it happens on the host, after a step's tokens have arrived.

What may yet turn out to be the beginning of a stop string is held back, so that a streamed text
never shows a part of one. Only what is held back is searched: what has been given out cannot be the
beginning of a stop string, so the work does not grow with the text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mlx_t5.text.detokenizer import StreamingDetokenizer


class TextWatch:
    """The text of one row, as far as it is certain, up to a stop string.

    Attributes:
        pieces: the text that each token taken so far has made certain.
        rest: what follows the last of them, once the text has ended.
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        """Watches for these strings, of at least one character each."""
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.pieces: list[str] = []
        self.rest = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """The text so far, without what may still change."""
        return "".join(self.pieces) + self.rest

    def fork(self) -> TextWatch:
        """Another watch that has read the same."""
        other = copy.copy(self)
        other._detokenizer, other.pieces = self._detokenizer.fork(), list(self.pieces)
        return other

    def take(self, tokens: Sequence[int]) -> int:
        """Reads tokens up to the one that completes a stop string; returns how many it read."""
        for count, token in enumerate(tokens, 1):
            self._held += self._detokenizer.add(token)
            # If this were the last token, the text would end like this.
            ending = self._held + self._detokenizer.peek()
            stops = [index for index in map(ending.find, self._stop) if index >= 0]
            if stops:
                self.pieces.append(ending[: min(stops)])
                self.stopped = True
                return count
            certain = len(self._held) - self._beginning()
            self.pieces.append(self._held[:certain])
            self._held = self._held[certain:]
        return len(tokens)

    def finish(self) -> None:
        """Ends the text: nothing needs to be held back any longer."""
        if not self.stopped:
            self.rest = self._held + self._detokenizer.finish()

    def _beginning(self) -> int:
        """Length of the longest end of what is held that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
