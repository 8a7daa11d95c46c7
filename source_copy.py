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

from collections.abc import Collection, Sequence
from typing import Any

from acceptance import Sampling, one_hot
from backend import mx
from drafters import Drafter, Proposal
from model import T5

LONGEST_MATCH = 8  # a longer agreement tells no more about where the text goes on
SHORTEST_REPEAT = 3  # tokens that have to recur before the output is taken for its own source
STRONG_MATCH = 2  # tokens in a row that were copies, for copying to go before the draft model
PREFIX_TOKENS = 16  # a task prefix ("fix grammar:") ends among the first so many tokens


class Trail:
    """Where in its source one row's output stands.

    Attributes:
        source: the row's source tokens, EOS included.
        place: index in the source of the token expected next.
        match: how many of the last tokens agree with the source in front of `place`.
        output: the tokens followed so far.
    """

    def __init__(self, source: Sequence[int], begin: int):
        """Starts at source[begin], the first token of the text proper."""
        self.source = list(source)
        self.place = begin
        self.match = 0
        self.output: list[int] = []

    def follow(self, tokens: Sequence[int]) -> None:
        """Moves along tokens that have been committed."""
        for token in tokens:
            self.output.append(token)
            if self.place < len(self.source) and self.source[self.place] == token:
                self.place += 1
                self.match += 1
            else:
                self._find_again(token)

    def proposal(self, length: int) -> tuple[list[int], int]:
        """At most `length` tokens to come, and how long the match is that speaks for them."""
        ahead = self.source[self.place : self.place + length]
        if self.match < SHORTEST_REPEAT:
            repeated, match = self._repeated(length)
            if match > self.match:
                return repeated, match
        return ahead, self.match

    def _find_again(self, token: int) -> None:
        """Takes up the trail at another place of the source that has this token."""
        places = [i for i, other in enumerate(self.source) if other == token]
        if not places:
            self.place, self.match = self.place + 1, 0
            return
        matches = {i: _agreement(self.source[: i + 1], self.output) for i in places}
        found = max(places, key=lambda i: (matches[i], -abs(i - self.place), i))
        self.place, self.match = found + 1, matches[found]

    def _repeated(self, length: int) -> tuple[list[int], int]:
        """What followed the last tokens where they stood in the output before."""
        ends = range(SHORTEST_REPEAT, len(self.output))
        matches = {i: _agreement(self.output[:i], self.output) for i in ends}
        best = max(ends, key=lambda i: (matches[i], i), default=None)
        if best is None or matches[best] < SHORTEST_REPEAT:
            return [], 0
        return self.output[best : best + length], matches[best]


def _agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at the end of `a` and `b` agree, at most LONGEST_MATCH."""
    count = 0
    while count < min(LONGEST_MATCH, len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


class SourceCopy:
    """A drafter that copies; see `drafters.Drafter` for its verbs."""

    model = None

    def __init__(self, prefix_ends: Collection[int] = ()):
        """Takes the tokens that can end a task prefix (":"), none if there are no prefixes."""
        self.prefix_ends = frozenset(prefix_ends)
        self.trails: list[Trail] = []

    @classmethod
    def of(cls, tokenizer: Any) -> SourceCopy:
        """Reads off a tokenizer which tokens end a task prefix; None knows of no prefixes."""
        vocabulary = tokenizer.get_vocab() if tokenizer else {}
        return cls(i for token, i in vocabulary.items() if token.endswith(":"))

    def fresh(self) -> SourceCopy:
        """Returns a drafter for another batch, without rows."""
        return SourceCopy(self.prefix_ends)

    def insert(
        self, sources: Sequence[Sequence[int]], ids: mx.array, mask: mx.array | None
    ) -> None:
        """Starts a trail for each source; see `Drafter.insert`."""
        self.trails += [Trail(source, self._begin(source)) for source in sources]

    def propose(
        self,
        committed: Sequence[Sequence[int]],
        lengths: Sequence[int],
        sampling: Sampling,
        keys: mx.array | None,
    ) -> Proposal | None:
        """Reads the next tokens off the trails; see `Drafter.propose`."""
        self.follow(committed)
        rows = [trail.proposal(n)[0] for trail, n in zip(self.trails, lengths, strict=True)]
        return copied(rows)

    def kinds(self, committed: Sequence[Sequence[int]]) -> list[str]:
        """Tells copies that a match speaks for from others; see `Drafter.kinds`."""
        self.follow(committed)
        strong = [trail.proposal(1)[1] >= STRONG_MATCH for trail in self.trails]
        return ["copy" if match else "weak copy" for match in strong]

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.trails = [self.trails[row] for row in rows]

    def follow(self, committed: Sequence[Sequence[int]]) -> None:
        """Brings every trail up to what has been committed, the start token aside."""
        for trail, tokens in zip(self.trails, committed, strict=True):
            trail.follow(tokens[1 + len(trail.output) :])

    def _begin(self, source: Sequence[int]) -> int:
        """Where the text starts: after the task prefix, if it has one."""
        ends = (i + 1 for i, t in enumerate(source[:PREFIX_TOKENS]) if t in self.prefix_ends)
        return next(ends, 0)


def copied(rows: Sequence[Sequence[int]]) -> Proposal | None:
    """Tokens known on the host as a proposal, None if there are none."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    if width == 0:
        return None
    padded = [list(row) + [0] * (width - len(row)) for row in rows]
    return Proposal(mx.array(padded, mx.int32), None, lengths, ["copy"] * len(rows))


class CopyOrDraft:
    """A drafter that copies where the match is strong and asks a draft model elsewhere."""

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

    def insert(
        self, sources: Sequence[Sequence[int]], ids: mx.array, mask: mx.array | None
    ) -> None:
        """Adds the rows to both; see `Drafter.insert`."""
        self.draft.insert(sources, ids, mask)  # first, as it may run out of memory
        self.copy.insert(sources, ids, mask)

    def propose(
        self,
        committed: Sequence[Sequence[int]],
        lengths: Sequence[int],
        sampling: Sampling,
        keys: mx.array | None,
    ) -> Proposal | None:
        """Proposes for each row what one of the two has to say; see `Drafter.propose`."""
        self.copy.follow(committed)
        offers = [trail.proposal(n) for trail, n in zip(self.copy.trails, lengths, strict=True)]
        rows = [tokens if match >= STRONG_MATCH else [] for tokens, match in offers]
        wanted = [0 if row else n for row, n in zip(rows, lengths, strict=True)]
        copies, drafts = copied(rows), self.draft.propose(committed, wanted, sampling, keys)
        return merged(copies, drafts) if copies and drafts else copies or drafts

    def kinds(self, committed: Sequence[Sequence[int]]) -> list[str]:
        """Whose proposals each row would get; see `Drafter.kinds`."""
        self.copy.follow(committed)
        offers = [trail.proposal(1) for trail in self.copy.trails]
        return ["copy" if t and match >= STRONG_MATCH else "draft" for t, match in offers]

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
    )
