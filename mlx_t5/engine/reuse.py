"""Decodes a text once: greedy rows with equal tokens and settings share one answer.

Subtitles, menus and tables repeat lines. A greedy text with delta 0 depends only on its source
tokens and its settings, so the first of several equal rows is decoded, and the others take its
tokens when it is finished. An answer is taken as tokens, and converted to text anew for each row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mlx_t5.engine.rows import Row
from mlx_t5.settings import Settings

Key: TypeAlias = tuple[bytes, Settings]  # the tokens of prompt and prediction
MAX_ANSWERS, MAX_BYTES = 1000, 16_000_000


@dataclass(frozen=True)
class StoredText:
    """What a row has in common with all equal ones; `bytes` is about what it takes."""

    tokens: list[int]
    origins: list[str]
    settings: Settings
    drafted: int
    accepted: int
    bytes: int


class AnswerStore:
    """Answers of finished rows, the latest used last, and the rows that wait for an equal one.

    Only greedy rows with delta 0, and without beams, logits processors and log-probabilities, take
    part (see `GenerationRequest.rows`). A row that fails or leaves early gives no answer.
    """

    def __init__(
        self, eos: Sequence[int], most: int = MAX_ANSWERS, most_bytes: int = MAX_BYTES
    ) -> None:
        """Starts empty; `eos` are the target's end tokens."""
        self.eos, self.most, self.most_bytes = eos, most, most_bytes
        self.answers = OrderedDict[Key, StoredText]()
        self.bytes = 0
        self.decoding: dict[Key, list[Row]] = {}  # equal rows: one is decoded, the others wait

    def has(self, row: Row) -> bool:
        """Whether the row's answer is stored, or an equal row is being decoded."""
        return row.answer_key in self.answers or row.answer_key in self.decoding

    @property
    def waiting(self) -> list[Row]:
        """The rows that wait for an equal one."""
        return [row for rows in self.decoding.values() for row in rows[1:]]

    def add(self, row: Row) -> bool:
        """Returns whether the row must be decoded.

        Otherwise it is finished now, by a stored answer, or will be finished by `update`.
        """
        key = row.answer_key
        if key is None or not self.most:
            return True
        if key in self.answers:
            self.answers.move_to_end(key)
            row.reuse(self.answers[key], self.eos)
            return False
        rows = self.decoding.setdefault(key, [])
        rows.append(row)
        return rows == [row]

    def update(self) -> tuple[list[Row], list[Row]]:
        """Gives the answers of finished rows to the rows that waited for them.

        Returns:
            The rows that are finished by this, and rows that must be decoded after all, because the
            row for which they waited has failed.
        """
        finished = list[Row]()
        failed = [rows[0] for rows in self.decoding.values() if rows[0].error]
        again = self.remove(failed) if failed else []
        for key, (row, *equal) in [*self.decoding.items()]:
            if row.finish_reason is None:
                continue
            del self.decoding[key]
            tokens = [*row.tokens, *row.removed]  # so that the other rows end in the same place
            # A number in a list takes 36 bytes, and a pointer to a word 8.
            size = len(key[0]) + 44 * len(tokens) + 500
            counts = row.stats.drafted, row.stats.accepted
            answer = StoredText(tokens, row.origins, row.settings, *counts, size)
            for other in equal:
                other.reuse(answer, self.eos)
            finished += equal
            if row.finish_reason == "length" and row.settings != key[1]:
                continue  # cut off for lack of memory, of which there may be more later
            self.answers[key] = answer
            self.bytes += size
            while len(self.answers) > self.most or self.bytes > self.most_bytes:
                _, oldest = self.answers.popitem(last=False)
                self.bytes -= oldest.bytes
        return finished, again

    def remove(self, rows: Iterable[Row]) -> list[Row]:
        """Removes rows that failed or left; returns the rows to decode in their place."""
        gone, again = set(rows), list[Row]()
        for key, equal in [*self.decoding.items()]:
            remaining = [row for row in equal if row not in gone]
            if not remaining:
                del self.decoding[key]
                continue
            self.decoding[key] = remaining
            if remaining[0] is not equal[0]:
                again.append(remaining[0])
        return again
