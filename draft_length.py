"""How many tokens to propose: what a step is expected to yield against what it costs.

If each proposal is kept with probability alpha, independently, one pass of the target yields

    E(gamma) = (1 - alpha^(gamma+1)) / (1 - alpha)

tokens, and decoding gets faster by S(gamma) = E(gamma) / (gamma c + v(gamma+1) / v(1)): theorem 3.8
of https://arxiv.org/abs/2211.17192, with the cost of verifying measured instead of taken for free.
Estimating alpha while decoding follows the aim of https://arxiv.org/abs/2405.04304 and
https://arxiv.org/abs/2405.19715, without a classifier to train. Everything here is pure.

Symbols: alpha acceptance probability, gamma proposals, c cost of a draft pass relative to a regular
step, v(n) cost of a step that verifies n positions, B rows, S speed-up over regular decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

AUTO = "auto"  # in place of a number of proposals
LONGEST = 15  # proposals a row at most; beyond that they hardly ever all hold
GRID = 200  # steps of alpha that are told apart
STAY = 0.97  # of the best speed-up is enough to stay with the lengths that were chosen last
USUAL = 0.85  # alpha of proposals that are worth making
DRAFT_SHARED, COPY_SHARED = 1.0, 2.5  # speed-up promised to a row that all others wait for
WORTH = 1.05  # a promised speed-up below this is within what choosing costs and errors promise


def expected_tokens(alpha: float, gamma: int | np.ndarray) -> np.ndarray:
    """Tokens a step is expected to yield, the target's own included: E(gamma)."""
    if alpha >= 1:
        return gamma + 1.0
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def gains(outlooks: Sequence[tuple[float, int]]) -> list[list[float]]:
    """(B, LONGEST + 1): expected tokens of a step with 0, 1, … proposals.

    Looked up for alpha in steps of 1 / `GRID`, as this is done in every step.

    Args:
        outlooks: alpha of each row, and how many proposals can count.
    """
    table = _expectations()
    return [table[round(alpha * GRID)][room] for alpha, room in outlooks]


@cache
def _expectations() -> list[list[list[float]]]:
    return _expected_tokens().tolist()


@cache
def _expected_tokens() -> np.ndarray:
    """(GRID + 1, LONGEST + 1, LONGEST + 1): E by alpha, by room and by proposals."""
    lengths = np.arange(LONGEST + 1)
    useful = np.minimum(lengths[:, None], lengths)
    return np.stack([expected_tokens(i / GRID, useful) for i in range(GRID + 1)])


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step over a given number of rows, in seconds.

    Attributes:
        rows: B.
        draft: one pass of the draft over one position a row; 0 without a draft model.
        verify: the rest of a step, by how many positions a row it verifies: 1, 2, ….
        start: what a step that drafts costs besides its passes.
    """

    rows: int
    draft: float
    verify: tuple[float, ...]
    start: float = 0.0

    @property
    def regular(self) -> float:
        """A step without proposals."""
        return self.verify[0]

    @cached_property
    def table(self) -> np.ndarray:
        """(L + 1, L + 1): a step with up to d proposals of a model and up to k copied ones."""
        lengths = np.arange(len(self.verify))
        verify = np.array(self.verify)[np.maximum(lengths[:, None], lengths)]
        drafting = lengths * self.draft + (lengths > 0) * self.start
        return drafting[:, None] + verify

    @cached_property
    def rate(self) -> np.ndarray:
        """(L + 1, L + 1): speed-up of such a step for each token that it yields a row."""
        return self.regular / self.table

    @cached_property
    def rates(self) -> tuple[list[float], list[float]]:
        """`rate` of steps that only draft, and of those that only copy."""
        # What is drafted is verified as well, so nothing can be copied beside it for less.
        return self.rate.diagonal().tolist(), self.rate[0].tolist()

    @cached_property
    def alone(self) -> tuple[np.ndarray, np.ndarray]:
        """Speed-ups of one row by alpha, room and length, drafted and copied."""
        return tuple(_expected_tokens() * each for each in self.rates)

    @cached_property
    def promise(self) -> tuple[list[list[tuple[float, int]]], ...]:
        """The best of those speed-ups by alpha and room, and at what length it is reached."""
        return tuple(
            [
                list(zip(*pair, strict=True))
                for pair in zip(best.tolist(), length.tolist(), strict=True)
            ]
            for best, length in ((table.max(-1), table.argmax(-1)) for table in self.alone)
        )

    def promised(
        self, draft: tuple[float, int], copy: tuple[float, int]
    ) -> tuple[tuple[float, int], tuple[float, int]]:
        """What `promise` says of drafted and copied ones; arguments as of `best_for_one`."""
        return tuple(
            table[round(alpha * GRID)][room]
            for table, (alpha, room) in zip(self.promise, (draft, copy), strict=True)
        )

    def most(self, draft: tuple[float, int], copy: tuple[float, int]) -> float:
        """The best speed-up for one row; arguments as of `best_for_one`."""
        return max(self.promised(draft, copy))[0] if draft[1] or copy[1] else 1.0

    def scaled(self, rows: int) -> StepCosts:
        """For another number of rows, if all that counts is how many positions a pass has."""
        counts = np.arange(1, len(self.verify) + 1)
        positions = counts * rows / self.rows
        each = (self.verify[-1] - self.verify[0]) / max(counts[-1] - 1, 1)  # on average
        verify = np.interp(positions, counts, self.verify)
        verify += each * np.maximum(positions - counts[-1], 0)
        share = float(verify[0] / self.verify[0])
        return StepCosts(rows, self.draft * share, tuple(verify.tolist()), self.start * share)

    @property
    def price(self) -> str:
        """What proposals cost, in words."""
        c, v = self.draft / self.regular, self.verify[1] / self.regular
        return f"c {c:.2f}, v(2)/v(1) {v:.2f}"

    @cached_property
    def hopeless(self) -> bool:
        """Whether drafting costs more than it could ever save."""
        return best_for_one((1.0, LONGEST), (0.0, 0), self) == (0, 0)


@dataclass(frozen=True)
class Costs:
    """Costs of steps for one or more numbers of rows, ascending; others follow from these."""

    measured: tuple[StepCosts, ...]
    _known: dict[int, StepCosts] = field(default_factory=dict, compare=False, repr=False)

    def of(self, rows: int) -> StepCosts:
        """Costs of steps over so many rows; always the same object, as it has tables to keep."""
        if rows not in self._known:
            self._known[rows] = self._between(rows)
        return self._known[rows]

    def _between(self, rows: int) -> StepCosts:
        if len(self.measured) == 1:
            return self.measured[0].scaled(rows)
        widths = [costs.rows for costs in self.measured]
        place = int(np.clip(np.searchsorted(widths, rows), 1, len(widths) - 1))
        a, b = self.measured[place - 1 : place + 1]
        share = (rows - a.rows) / (b.rows - a.rows)
        pairs = zip((a.draft, a.start, *a.verify), (b.draft, b.start, *b.verify), strict=True)
        draft, start, *verify = [max(x + share * (y - x), min(x, y)) for x, y in pairs]
        return StepCosts(rows, draft, tuple(verify), start)


@dataclass
class Estimate:
    """A running estimate of alpha: how many proposals were judged lately and how many kept.

    Attributes:
        memory: judgements after which an old one counts 1/e.
        judged: weight of all of them. A step judges up to its first refused proposal.
        kept: weight of those that were kept.
    """

    memory: float
    judged: float = 0.0
    kept: float = 0.0

    def add(self, judged: int, kept: int) -> None:
        """Takes a step's outcome into account."""
        fade = (1 - 1 / self.memory) ** judged
        self.judged = self.judged * fade + judged
        self.kept = self.kept * fade + kept

    def alpha(self, prior: float, weight: float) -> float:
        """The estimate, with a prior that counts as much as `weight` judgements."""
        return (weight * prior + self.kept) / (weight + self.judged)


def judge(proposed: int, accepted: int, written: int, ended: bool) -> tuple[int, int]:
    """What a step tells about alpha: how many of its proposals were judged, and how many kept.

    What counts is whether a proposal made the step longer. So one that lies behind the end of the
    text is as good as refused, and the end token itself, which the target would have written
    without it, has not been judged.

    Args:
        proposed: tokens that were proposed.
        accepted: how many of them were accepted and are part of the text.
        written: tokens that the step wrote, the target's own included.
        ended: whether the text ended.
    """
    kept = min(accepted, written - 1)
    if ended and proposed == accepted == written:
        return kept, kept
    return kept + (proposed > kept), kept


def foresee(offered: Sequence[int], written: Sequence[int], ended: bool) -> tuple[int, int]:
    """What `judge` would have said of tokens that were known but not proposed.

    Args:
        offered: what could have been proposed.
        written: what was written instead; nothing is known beyond.
        ended: whether the text ended.
    """
    known = min(len(offered), len(written) - ended)
    kept = next((i for i in range(known) if offered[i] != written[i]), known)
    return kept + (kept < known), kept


def best_for_one(
    draft: tuple[float, int],
    copy: tuple[float, int],
    costs: StepCosts,
    last: tuple[int, int] = (0, 0),
) -> tuple[int, int]:
    """What `best_lengths` says of a single row, looked up.

    Args:
        draft: alpha of drafted proposals, and how many of them count.
        copy: the same of copied ones.
        costs: of the step.
        last: what was chosen last.
    """
    (drafting, drafted), (copying, copied) = costs.promised(draft, copy)
    best = max(drafting, copying)
    if best < WORTH:
        return 0, 0
    if any(last):
        alpha, room = draft if last[0] else copy
        before = costs.alone[not last[0]][round(alpha * GRID), room, last[0] or last[1]]
        if before >= max(STAY * best, WORTH):
            return (last[0], 0) if last[0] else last
    return (drafted, 0) if drafting > copying else (0, copied)


def usual_for_one(
    draft: tuple[float, int], copy: tuple[float, int], costs: StepCosts
) -> tuple[int, int]:
    """The length that is best at alpha `USUAL`, drafted or copied, if it pays at the real one.

    For rows that share their steps but must not know of each other: a step takes as long as its
    longest proposal, so lengths that differ would be paid for by all and used by few. Most texts
    can be drafted alike, and a row that stopped would wait for the others all the same, so drafting
    goes on until it promises nothing. Copies hold in some texts and not in others; as all would
    wait for them, they have to promise much.

    Args:
        draft: alpha of drafted proposals, and how many of them count.
        copy: the same of copied ones.
        costs: of the step.
    """
    (_, drafted), (_, copied) = costs.promised((USUAL, draft[1]), (USUAL, copy[1]))
    by_draft = costs.alone[0][round(draft[0] * GRID), draft[1], drafted]
    by_copy = costs.alone[1][round(copy[0] * GRID), copy[1], copied]
    if by_copy >= max(COPY_SHARED, by_draft):
        return 0, copied
    return (drafted, 0) if by_draft >= DRAFT_SHARED else (0, 0)


def best_lengths(
    drafts: Sequence[tuple[float, int]],
    copies: Sequence[tuple[float, int]],
    costs: StepCosts,
    last: tuple[int, int] = (0, 0),
) -> tuple[int, int]:
    """The numbers of proposals that make a step over these rows worth most.

    Rows share the step, so they share its length: a row's padding would cost as much as its
    proposals. Each takes from the draft or copies, whichever promises it more. What was chosen last
    is chosen again if that promises nearly as much: the estimates are no more exact, and passes of
    the same shape as the last ones are a little faster.

    Args:
        drafts: alpha of each row's drafted proposals, and how many of them count.
        copies: the same of copied ones.
        costs: of the step.
        last: what was chosen last.

    Returns:
        How many to draft and how many to copy; (0, 0) if the speed-up would not reach `WORTH`.
    """
    drafting, copying = (any(room for _, room in outlooks) for outlooks in (drafts, copies))
    if not (drafting and copying):
        outlooks, before = (drafts, last[0]) if drafting else (copies, last[1])
        best = _best_length(gains(outlooks), costs.rates[not drafting], before)
        return (best, 0) if drafting else (0, best)
    least = WORTH * len(drafts)
    # No row gains more from a step that all share than from the one that suits it best.
    if sum(map(costs.most, drafts, copies)) < least:
        return 0, 0
    by_draft, by_copy = np.array(gains(drafts)), np.array(gains(copies))
    speedup = np.maximum(by_draft[:, :, None], by_copy[:, None, :]).sum(0) * costs.rate
    best = divmod(int(speedup.argmax()), LONGEST + 1)
    if speedup[best] < least:
        return 0, 0
    return last if speedup[last] >= max(STAY * speedup[best], least) else best


def _best_length(expected: Sequence[Sequence[float]], rates: Sequence[float], last: int) -> int:
    """`best_lengths` where all proposals are of one kind; for few rows lists are faster."""
    totals = map(sum, zip(*expected, strict=True))
    speedup = [tokens * rate for tokens, rate in zip(totals, rates, strict=True)]
    best, least = max(speedup), WORTH * len(expected)
    if best < least:
        return 0
    return last if speedup[last] >= max(STAY * best, least) else speedup.index(best)
