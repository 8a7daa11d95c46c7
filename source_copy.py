"""Proposals copied from the source, for output that follows its input.

Corrections, simplifications and summaries repeat much of the text they are made from, so the next
tokens can often be read off the encoder's input: Sun et al., "Instantaneous Grammatical Error
Correction with Shallow Aggressive Decoding" (https://arxiv.org/abs/2106.04970), and Ge et al.,
"Lossless Acceleration for Seq2seq Generation with Aggressive Decoding"
(https://arxiv.org/abs/2205.10350). No model is asked, so a proposal costs nothing but its place in
the target's next pass; it is deterministic, q(x) = 1.

A `Trail` follows one row through its source. A token of the output that stands where the trail
points is a copy, and the trail moves on. After any other token it looks for that token elsewhere,
the place with the longest match first and then the nearest, so that copying resumes where the
source resumes after an insertion, a deletion or a move. A token that the source does not have is
taken for the replacement of the one the trail points to. The output so far is searched as well,
for phrases that repeat in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from backend import mx
from drafters import Drafter, Offer, Proposal
from model import T5
from prompts import task_prefix
from sampling import Sampling, one_hot

LONGEST_MATCH = 8  # a longer agreement tells no more about where the text goes on
SHORTEST_REPEAT = 3  # tokens that have to recur before the output is taken for its own source
LATEST = 16  # places where they occurred that are compared
RECENT = 4  # at least half of the last so many tokens have to be copies for much to speak for more


class Trail:
    """Where in its source one row's output stands.

    Attributes:
        source: the row's source tokens, EOS included.
        place: index in the source of the token expected next.
        match: how many of the last tokens agree with the source in front of `place`.
        output: the tokens followed so far.
        copies: for each of the last `RECENT` of them, whether it was the one expected.
        phrases: where in the output each run of `SHORTEST_REPEAT` tokens has ended.
    """

    def __init__(self, source: Sequence[int], begin: int):
        """Starts at source[begin], the first token of the text proper."""
        self.source = list(source)
        self.place = begin
        self.match = 0
        self.output: list[int] = []
        self.copies: deque[bool] = deque(maxlen=RECENT)
        self.phrases: dict[tuple[int, ...], list[int]] = {}

    def follow(self, tokens: Sequence[int]) -> None:
        """Moves along tokens that have been committed."""
        for token in tokens:
            if len(self.output) >= SHORTEST_REPEAT:
                phrase = tuple(self.output[-SHORTEST_REPEAT:])
                self.phrases.setdefault(phrase, []).append(len(self.output))
            self.output.append(token)
            expected = self.place < len(self.source) and self.source[self.place] == token
            self.copies.append(expected)
            if expected:
                self.place += 1
                self.match += 1
            else:
                self._find_again(token)

    def proposal(self, length: int) -> tuple[list[int], bool]:
        """At most `length` tokens to come, and whether much speaks for them."""
        if self.match < SHORTEST_REPEAT:
            ends = self.phrases.get(tuple(self.output[-SHORTEST_REPEAT:]), ())[-LATEST:]
            best = max(ends, key=lambda i: (_agreement(self.output[:i], self.output), i), default=0)
            if best:
                return self.output[best : best + length], True
        strong = 2 * sum(self.copies) >= len(self.copies) > 0
        return self.source[self.place : self.place + length], strong

    def _find_again(self, token: int) -> None:
        """Takes up the trail at another place of the source that has this token."""
        places = [i for i, other in enumerate(self.source) if other == token]
        if not places:
            self.place, self.match = self.place + 1, 0
            return
        matches = {i: _agreement(self.source[: i + 1], self.output) for i in places}
        found = max(places, key=lambda i: (matches[i], -abs(i - self.place), i))
        self.place, self.match = found + 1, matches[found]


def _agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at the end of `a` and `b` agree, at most LONGEST_MATCH."""
    count = 0
    while count < min(LONGEST_MATCH, len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


class SourceCopy:
    """A drafter that copies; see `drafters.Drafter` for its verbs."""

    model = None

    def __init__(self, tokenizer: Any = None):
        """Takes the tokenizer to tell a task prefix by; without one copying begins at the start."""
        self.tokenizer = tokenizer
        self.trails: list[Trail] = []

    def fresh(self) -> SourceCopy:
        """Returns a drafter for another batch, without rows."""
        return SourceCopy(self.tokenizer)

    def insert(self, sources: Sequence[Sequence[int]]) -> None:
        """Starts a trail for each source; see `Drafter.insert`."""
        self.trails += [Trail(s, len(task_prefix(s, self.tokenizer))) for s in sources]

    def offers(
        self,
        committed: Sequence[Sequence[int]],
        limits: Sequence[int],
        resting: Collection[int] = (),
    ) -> list[list[Offer]]:
        """Reads the next tokens off the trails; see `Drafter.offers`."""
        offers = []
        for i, (trail, limit) in enumerate(zip(self.trails, limits, strict=True)):
            if limit == 0 or i in resting:
                offers.append([])
                continue
            trail.follow(committed[i][1 + len(trail.output) :])  # the start token is not output
            ahead, strong = trail.proposal(limit)
            kind = "copy" if strong else "weak copy" if trail.output else "first copy"
            offers.append([Offer(kind, len(ahead), tuple(ahead))] if ahead else [])
        return offers

    def propose(
        self,
        committed: Sequence[Sequence[int]],
        chosen: Sequence[Offer],
        sampling: Sampling,
        keys: mx.array | None,
    ) -> Proposal | None:
        """Proposes the tokens that were offered; see `Drafter.propose`."""
        return copied([offer.tokens or () for offer in chosen])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.trails = [self.trails[row] for row in rows]


def copied(rows: Sequence[Sequence[int]]) -> Proposal | None:
    """Tokens known on the host as a proposal, None if there are none."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    if width == 0:
        return None
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return Proposal(mx.array(padded, mx.int32), None, lengths, ["copy"] * len(rows))


class CopyOrDraft:
    """A drafter that would rather copy where much speaks for it and else ask a draft model."""

    def __init__(self, copy: SourceCopy, draft: Drafter):
        """Combines two drafters; the draft model's passes are saved while all rows copy."""
        self.copy, self.draft = copy, draft

    @property
    def model(self) -> T5 | None:
        """The draft model."""
        return self.draft.model

    def fresh(self) -> CopyOrDraft:
        """Returns a drafter for another batch, without rows."""
        return CopyOrDraft(self.copy.fresh(), self.draft.fresh())

    def insert(self, sources: Sequence[Sequence[int]]) -> None:
        """Adds the rows to both; see `Drafter.insert`."""
        self.draft.insert(sources)  # first, as it may run out of memory
        self.copy.insert(sources)

    def offers(
        self,
        committed: Sequence[Sequence[int]],
        limits: Sequence[int],
        resting: Collection[int] = (),
    ) -> list[list[Offer]]:
        """What each of the two offers; see `Drafter.offers`."""
        copies, drafts = (d.offers(committed, limits, resting) for d in (self.copy, self.draft))
        # How a text begins is better left to the draft model than to chance.
        return [
            copy + draft
            if copy and copy[0].kind == "copy"
            else draft + [Offer("weak copy", offer.length, offer.tokens) for offer in copy]
            for copy, draft in zip(copies, drafts, strict=True)
        ]

    def propose(
        self,
        committed: Sequence[Sequence[int]],
        chosen: Sequence[Offer],
        sampling: Sampling,
        keys: mx.array | None,
    ) -> Proposal | None:
        """Has each row's proposal made by the one whose offer was chosen; see `Drafter.propose`."""
        copies, drafts = (
            d.propose(committed, chosen, sampling, keys) for d in (self.copy, self.draft)
        )
        return merged(copies, drafts) if copies and drafts else copies or drafts

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.copy.keep(rows)
        self.draft.keep(rows)


def merged(copies: Proposal, drafts: Proposal) -> Proposal:
    """The rows that copy from one proposal and the others from the other."""
    width = max(copies.tokens.shape[1], drafts.tokens.shape[1])
    a, b = (mx.pad(p.tokens, ((0, 0), (0, width - p.tokens.shape[1]))) for p in (copies, drafts))
    copying = mx.array([n > 0 for n in copies.lengths])[:, None]
    tokens, q = mx.where(copying, a, b), drafts.q
    if q is not None:
        q = mx.pad(q, ((0, 0), (0, width - q.shape[1]), (0, 0)))
        q = mx.where(copying[..., None], one_hot(tokens, q.shape[-1]), q)
    pairs = list(zip(copies.lengths, drafts.lengths, strict=True))
    return Proposal(
        tokens,
        q,
        [copy or draft for copy, draft in pairs],
        ["copy" if copy else "draft" for copy, _ in pairs],
        copying | mx.pad(drafts.sound, ((0, 0), (0, width - drafts.sound.shape[1]))),
    )
