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
alignment begins with it. Any drafter, even a draft model alone, also copies from this text.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.drafting.proposals import Choice, Drafter, Kind, Offer, Proposal, Rows
from mlx_t5.model import T5
from mlx_t5.sampling.draws import Sampling, one_hot
from mlx_t5.text.prompts import task_prefix

LONGEST_MATCH = 8  # tokens; longer matches count the same
SHORTEST_REPEAT = 3  # tokens that must recur before the output is copied from itself
CANDIDATES = 16  # places compared: the latest in the output, the nearest in the source
RECENT = 4  # number of last tokens; if fewer than half of them are copies, copying is unlikely
COMPARED = 16  # maximum number of tokens offered, and compared with the text even if not proposed
COPY = Kind("copy", 2.0, 0.35)
WEAK_COPY = Kind("weak copy", 0.75, 2.25)  # after few copies, see `RECENT`
FIRST_COPY = Kind("first copy", 0.4, 0.6)  # alpha: near 0.9 in corrections, 0.1 in translations
PREDICTION = Kind("prediction", 2.0, 0.35)
WEAK_PREDICTION = Kind("weak prediction", 0.75, 2.25)
FIRST_PREDICTION = Kind("first prediction", 1.5, 0.3)  # callers may be wrong


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

    def __init__(self, source: Sequence[int], begin: int):
        """Starts at source[begin], the first token after a task prefix."""
        self.source = list(source)
        self.predicted = 0
        self.place = begin
        self.match = 0
        self.output: list[int] = []
        self.copies: deque[bool] = deque(maxlen=RECENT)
        self.phrases = defaultdict[tuple[int, ...], list[int]](list)
        self.places = defaultdict[tuple[int, ...], list[int]](list)

    def predict(self, prediction: Sequence[int]) -> None:
        """Puts a prediction before the source and starts with it; ignores a second prediction."""
        if prediction and not self.predicted:
            self.source, self.place = [*prediction, *self.source], 0
            self.predicted = len(prediction)

    def follow(self, tokens: Sequence[int]) -> None:
        """Adds newly committed tokens to the output, and moves to the place after them."""
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

    def find(self, length: int = COMPARED) -> Offer | None:
        """Returns an offer of up to `length` tokens that may come next, or None."""
        if tokens := self._repeated(length):
            return Offer(COPY, tokens)
        predicted = self.place < self.predicted
        end = min(self.place + length, self.predicted if predicted else len(self.source))
        kind = PREDICTION if predicted else COPY
        if not self.output:
            kind = FIRST_PREDICTION if predicted else FIRST_COPY
        elif 2 * sum(self.copies) < len(self.copies):
            if predicted and not self.match:
                return None  # so that a wrong prediction does not cost time in every step
            kind = WEAK_PREDICTION if predicted else WEAK_COPY
        tokens = self.source[self.place : end]
        return Offer(kind, tokens) if tokens else None

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
    alignment, agreed, compared = Alignment((), 0), set[int](), 0
    alignment.predict(prediction)
    for token in text:
        alignment.follow([token])
        compared = max(compared, alignment.place)
        if alignment.match:
            agreed.add(alignment.place)
    return min(compared, len(prediction)), len(agreed)


class SourceCopy:
    """A drafter that copies from sources and predictions; its methods are those of `Drafter`."""

    model = None

    def __init__(self, tokenizer: Any = None, lookup: bool = True):
        """Starts without rows.

        Args:
            tokenizer: used to find a task prefix, after which copying begins; with None, copying
                begins at the start of the source.
            lookup: whether to copy from sources; if not, only from predictions.
        """
        self.tokenizer, self.lookup = tokenizer, lookup
        self.alignments: list[Alignment] = []

    def fresh(self) -> SourceCopy:
        """Returns an empty drafter for another batch."""
        return SourceCopy(self.tokenizer, self.lookup)

    def insert(self, sources: Rows, states: Sequence[mx.array] | None = None) -> None:
        """Starts an alignment for each source; see `Drafter.insert`."""
        known = sources if self.lookup else [()] * len(sources)
        self.alignments += [Alignment(s, len(task_prefix(s, self.tokenizer))) for s in known]

    def offers(self) -> Sequence[Sequence[Offer]]:
        """Returns for each row an offer of copied tokens, or none if it has nothing to copy."""
        offers = (alignment.find() for alignment in self.alignments)
        return [[offer] if offer else [] for offer in offers]

    def propose(
        self, committed: Rows, choices: Sequence[Choice], sampling: Sampling, keys: mx.array | None
    ) -> Proposal | None:
        """Returns a proposal of the chosen tokens; see `Drafter.propose`."""
        rows = [list(choice.tokens) for choice in choices]
        lengths = [len(row) for row in rows]
        if not any(lengths):
            return None
        padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
        tokens, valid = mx.array(padded, mx.int32), mx.array(lengths, mx.int32)
        return Proposal(tokens, None, lengths, [COPY.writer] * len(rows), valid)

    def note(self, committed: Rows) -> None:
        """Moves each alignment on by the row's new tokens, without the start token."""
        for alignment, row in zip(self.alignments, committed, strict=True):
            alignment.follow(row[1 + len(alignment.output) :])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only the rows with these indices, which are ascending."""
        self.alignments = [self.alignments[row] for row in rows]


class CopyOrDraft:
    """A drafter that either copies or runs a draft model, as chosen for each row."""

    def __init__(self, copy: SourceCopy, draft: Drafter):
        """Combines two drafters; while all rows copy, the draft model is not run."""
        self.copy, self.draft = copy, draft

    @property
    def model(self) -> T5 | None:
        """The draft model."""
        return self.draft.model

    def fresh(self) -> CopyOrDraft:
        """Returns an empty drafter for another batch."""
        return CopyOrDraft(self.copy.fresh(), self.draft.fresh())

    def insert(self, sources: Rows, states: Sequence[mx.array] | None = None) -> None:
        """Adds the rows to both drafters; see `Drafter.insert`."""
        self.copy.insert(sources)
        self.draft.insert(sources, states)

    def offers(self) -> Sequence[Sequence[Offer]]:
        """Returns the offers of both drafters."""
        offers = zip(self.copy.offers(), self.draft.offers(), strict=True)
        return [[*copied, *drafted] for copied, drafted in offers]

    def propose(
        self, committed: Rows, choices: Sequence[Choice], sampling: Sampling, keys: mx.array | None
    ) -> Proposal | None:
        """Returns the chosen proposals of both drafters, merged; see `Drafter.propose`."""
        copies = self.copy.propose(committed, choices, sampling, keys)
        drafts = self.draft.propose(committed, choices, sampling, keys)
        return merged(copies, drafts) if copies and drafts else copies or drafts

    def note(self, committed: Rows) -> None:
        """Passes the rows' tokens on to both drafters."""
        self.copy.note(committed)
        self.draft.note(committed)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only the rows with these indices, which are ascending."""
        self.copy.keep(rows)
        self.draft.keep(rows)


def merged(copies: Proposal, drafts: Proposal) -> Proposal:
    """Merges two proposals: rows with copied tokens use `copies`, all other rows `drafts`."""
    a, b = copies.tokens, drafts.tokens
    assert a is not None and b is not None, "as both propose"
    width = max(a.shape[1], b.shape[1])
    a, b = (mx.pad(tokens, ((0, 0), (0, width - tokens.shape[1]))) for tokens in (a, b))
    copying = mx.array([n > 0 for n in copies.lengths])[:, None]
    tokens, q = mx.where(copying, a, b), drafts.q
    if q is not None:
        q = mx.pad(q, ((0, 0), (0, width - q.shape[1]), (0, 0)))
        q = mx.where(copying[..., None], one_hot(tokens, q.shape[-1]), q)
    lengths = [a or b for a, b in zip(copies.lengths, drafts.lengths, strict=True)]
    writers = [COPY.writer if length else "draft" for length in copies.lengths]
    valid = mx.where(copying[:, 0], copies.valid_lengths, drafts.valid_lengths)
    return Proposal(tokens, q, lengths, writers, valid)


def predicting(drafter: Drafter | None, predictions: Rows) -> Drafter | None:
    """Returns a drafter that also copies from these predictions.

    If no row has a prediction, removes the copying that an earlier call added.

    Args:
        drafter: the batch's current drafter; None if nothing is proposed.
        predictions: each row's prediction, empty if it has none.
    """
    copy = drafter.copy if isinstance(drafter, CopyOrDraft) else drafter
    if not isinstance(copy, SourceCopy):
        copy = SourceCopy(lookup=False)
        copy.insert(predictions)
        drafter = CopyOrDraft(copy, drafter) if drafter else copy
    elif not copy.lookup and not any(predictions):
        return drafter.draft if isinstance(drafter, CopyOrDraft) else None
    for alignment, prediction in zip(copy.alignments, predictions, strict=True):
        alignment.predict(prediction)
    return drafter
