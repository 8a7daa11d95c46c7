"""Copies proposals from the source, for output that resembles the input.

Corrections, simplifications and summaries repeat much of their source, so the next tokens can often
be copied from the encoder's input. The idea is from Sun et al., "Instantaneous Grammatical Error
Correction with Shallow Aggressive Decoding" (https://arxiv.org/abs/2106.04970), and Ge et al.,
"Lossless Acceleration for Seq2seq Generation with Aggressive Decoding"
(https://arxiv.org/abs/2205.10350). No draft model runs, so a proposal costs only one more position
in the target's next pass. Copied proposals are deterministic: q(x) = 1.

An `Alignment` follows the output of one row through its source. If the next output token is the
source token that the alignment expects, the token is a copy, and the alignment moves on by one.
Otherwise the alignment looks for the output token elsewhere in the source, so that copying resumes
after an insertion, a deletion or a move. The alignment chooses the place with the longest match,
and among equal matches the nearest place. A token that is not in the source counts as a replacement
of the expected token, so the alignment moves on by one.

The output is also copied from itself. If the last three output tokens occur earlier in the output,
the tokens that followed them there are proposed. But if the last three output tokens equal the
source tokens just before the expected token, source tokens are proposed.

The caller's expected text (`prediction` of `generate`) is put in front of the source, and the
alignment begins with it. An engine without a drafter copies from this text alone.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from mlx_t5.drafting.proposals import Copy, Kind, Rows
from mlx_t5.text.prompts import task_prefix

LONGEST_MATCH = 8  # tokens; longer matches count the same
SHORTEST_REPEAT = 3  # tokens that must recur before the output is copied from itself
CANDIDATES = 16  # places compared: the latest in the output, the nearest in the source
RECENT = 4  # number of last tokens; if fewer than half of them are copies, copying is unlikely
COMPARED = 16  # maximum number of copied tokens; not all of them may be proposed
COPY = Kind("copy", 2.0, 0.35)
WEAK_COPY = Kind("weak copy", 0.75, 2.25)  # after few copies, see `RECENT`
FIRST_COPY = Kind("first copy", 0.4, 0.6)  # alpha: near 0.9 in corrections, 0.1 in translations
PREDICTION = Kind("prediction", 2.0, 0.35)
WEAK_PREDICTION = Kind("weak prediction", 0.75, 2.25)
FIRST_PREDICTION = Kind("first prediction", 1.5, 0.3)  # callers may be wrong
NO_COPY = Copy(COPY, ())


class Alignment:
    """The position of one row's output in its source.

    Attributes:
        source: tokens of the prediction, then of the source, EOS included.
        predicted: number of tokens of the prediction.
        place: index in `source` of the token expected next.
        match: how many of the last output tokens equal the source tokens before `place`.
        output: the output tokens so far.
        copies: for each of the last `RECENT` output tokens, whether it was the expected token.
        phrases: maps each run of `SHORTEST_REPEAT` output tokens to the indices where it ends.
        places: maps each run of up to `SHORTEST_REPEAT` source tokens to the indices where it ends;
            filled when first needed.
    """

    def __init__(self, source: Sequence[int], begin: int, prediction: Sequence[int] = ()):
        """Starts with the prediction, or at source[begin], the first token after a task prefix."""
        self.source = [*prediction, *source]
        self.predicted = len(prediction)
        self.place = 0 if prediction else begin
        self.match = 0
        self.output: list[int] = []
        self.copies: deque[bool] = deque(maxlen=RECENT)
        self.phrases = defaultdict[tuple[int, ...], list[int]](list)
        self.places = defaultdict[tuple[int, ...], list[int]](list)

    def follow(self, tokens: Sequence[int]) -> None:
        """Adds new tokens to the output, and moves to the place after them."""
        for token in tokens:
            if len(self.output) >= SHORTEST_REPEAT:
                phrase = tuple(self.output[-SHORTEST_REPEAT:])
                self.phrases[phrase].append(len(self.output))
            self.output.append(token)
            expected = self.place < len(self.source) and self.source[self.place] == token
            self.copies.append(expected)
            if expected:
                self.place += 1
                self.match += 1
            else:
                self._find_again()

    def find(self, length: int = COMPARED) -> Copy:
        """Returns up to `length` tokens that may come next."""
        if tokens := self._repeated(length):
            return Copy(COPY, tokens)
        predicted = self.place < self.predicted
        end = min(self.place + length, self.predicted if predicted else len(self.source))
        kind = PREDICTION if predicted else COPY
        if not self.output:
            kind = FIRST_PREDICTION if predicted else FIRST_COPY
        elif 2 * sum(self.copies) < len(self.copies):
            if predicted and not self.match:
                return Copy(kind, ())  # or a wrong prediction would cost time in every step
            kind = WEAK_PREDICTION if predicted else WEAK_COPY
        return Copy(kind, self.source[self.place : end])

    def _repeated(self, length: int) -> list[int]:
        """Returns up to `length` tokens that follow an earlier match of the last output tokens."""
        if self.match >= SHORTEST_REPEAT or len(self.source) == self.predicted:
            return []  # the source is more reliable, or only the prediction is to be copied
        ends = self.phrases.get(tuple(self.output[-SHORTEST_REPEAT:]), ())[-CANDIDATES:]
        best = max(ends, key=lambda end: (self._agreement(self.output, end), end), default=0)
        return self.output[best : best + length] if best else []

    def _find_again(self) -> None:
        """Moves to the place in the source that best matches the last output tokens.

        Without a match, moves on by one.
        """
        if not self.places:
            for length in range(1, SHORTEST_REPEAT + 1):
                runs = zip(*(self.source[i:] for i in range(length)), strict=False)
                for end, run in enumerate(runs, length):
                    self.places[run].append(end)
        last = self.output[-SHORTEST_REPEAT:]
        ends_of_output = (tuple(last[i:]) for i in range(len(last)))
        ends = next((self.places[run] for run in ends_of_output if run in self.places), None)
        if ends is None:
            self.place, self.match = self.place + 1, 0
            return
        first = max(bisect(ends, self.place) - CANDIDATES // 2, 0)
        near = ends[first : first + CANDIDATES]
        matches = {end: self._agreement(self.source, end) for end in near}
        next_place = max(near, key=lambda end: (matches[end], -abs(end - 1 - self.place), end))
        self.place, self.match = next_place, matches[next_place]

    def _agreement(self, tokens: Sequence[int], end: int) -> int:
        """Returns how many tokens before index `end` equal the last output tokens, at most 8."""
        count, most = 0, min(LONGEST_MATCH, end, len(self.output))
        while count < most and tokens[end - 1 - count] == self.output[-1 - count]:
            count += 1
        return count


def count_predicted(prediction: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
    """Compares a prediction with a text.

    Returns:
        The number of the prediction's tokens up to the end of the text, and how many of these
        tokens are in the text.
    """
    alignment, agreed, compared = Alignment((), 0, prediction), set[int](), 0
    for token in text:
        alignment.follow([token])
        compared = max(compared, alignment.place)
        if alignment.match:
            agreed.add(alignment.place)
    return min(compared, len(prediction)), len(agreed)


class SourceCopy:
    """A drafter that copies from sources and predictions; its methods are those of `Drafter`."""

    def __init__(self, tokenizer: Any = None, lookup: bool = True):
        """Starts without rows.

        Args:
            tokenizer: used to find a task prefix, after which copying begins; with None, copying
                begins at the start of the source.
            lookup: whether to copy from sources; if not, only from predictions.
        """
        self.tokenizer, self.lookup = tokenizer, lookup
        self.alignments: list[Alignment | None] = []  # None if there is nothing to copy from

    def empty(self) -> SourceCopy:
        """Returns a drafter without rows for another batch."""
        return SourceCopy(self.tokenizer, self.lookup)

    def insert(self, sources: Rows, predictions: Rows) -> None:
        """Starts the alignments of new rows; see `Drafter.insert`."""
        for source, prediction in zip(sources, predictions, strict=True):
            alignment = None
            if self.lookup:
                begin = len(task_prefix(source, self.tokenizer))
                alignment = Alignment(source, begin, prediction)
            elif prediction:
                alignment = Alignment((), 0, prediction)
            self.alignments.append(alignment)

    def propose(self) -> list[Copy]:
        """Returns the tokens that each row could copy next; see `Drafter.propose`."""
        return [alignment.find() if alignment else NO_COPY for alignment in self.alignments]

    def update(self, tokens: Rows) -> None:
        """Moves each alignment on by the row's new tokens, without the start token."""
        for alignment, row in zip(self.alignments, tokens, strict=True):
            if alignment:
                alignment.follow(row[1 + len(alignment.output) :])

    def filter(self, rows: Sequence[int]) -> None:
        """Keeps only the rows with these indices, which are ascending."""
        self.alignments = [self.alignments[row] for row in rows]
