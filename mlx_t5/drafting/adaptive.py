"""Chooses how many tokens to propose to each row in a step.

If each proposal is accepted with probability alpha, a step with gamma proposals yields
1 + alpha + … + alpha^gamma tokens on average. `Adaptive` chooses the gamma, possibly 0, that gives
the most tokens per second. All rows of a batch share a step, so the seconds of a step (costs.py)
are compared with the expected tokens of all rows together.

A few proposals say little about alpha, so alpha has a beta distribution. After `a` accepted and `b`
rejected proposals, E[alpha^i] = product of (a + j) / (a + b + j) over j = 0, …, i - 1.

A draft that does not pay is not called, but two of its tokens are tried at the beginning of a text,
for as long as they are accepted, and in every 24th step after that, because the text may have
become easier to guess.

delta is the leniency of the target's check (sampling/acceptance.py). Rows learn as follows:

- Greedy rows with delta = 0 learn from each other and from measured times. The number of proposals
  rarely changes their texts (only by rounding).
- All other rows use a fixed table of costs, so that every run of a command gives the same text.
  Sampled rows with delta = 0 learn from the sampled rows of the same call. A row with delta > 0
  learns only from its own proposals, so that other rows cannot change its text.

Symbols: B rows, gamma proposals, N values of gamma that are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import eq
from typing import TYPE_CHECKING

import numpy as np

from mlx_t5.drafting.costs import MOST, NUMBERS, StepCosts
from mlx_t5.drafting.draft_model import DRAFT
from mlx_t5.drafting.proposals import Copy, Kind, Rows
from mlx_t5.settings import AUTO

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Row

# The weight of an old proposal after each new one. What rows share fades more slowly, or the last
# rows of a batch, often the hardest ones, would decide how the next batch begins.
FADE, SHARED_FADE = 1 - 1 / 80, 1 - 1 / 400
OTHERS = 20.0  # maximum weight of the prior and of other rows, in proposals
TRIAL = int(NUMBERS.searchsorted(2))  # the index in `NUMBERS` of a trial's proposals
TRIAL_STEPS = 24  # steps from one trial to the next


class AcceptanceStats:
    """Counts the proposals of one row, of all greedy rows, or of the sampled rows of a call.

    Attributes:
        counts: numbers of accepted and rejected proposals by kind; older proposals count less.
        until_trial: number of steps until a draft that does not pay is tried again.
        promising: of one row, whether nothing that the draft proposed has been rejected.
    """

    def __init__(self) -> None:
        """Starts without proposals."""
        self.counts = defaultdict[Kind, np.ndarray](lambda: np.zeros(2))
        self.until_trial, self.promising = 0, True

    def expected_tokens(self, kind: Kind, most: int, shared: AcceptanceStats) -> np.ndarray:
        """Returns a step's mean tokens for each of `NUMBERS`, if at most `most` can be proposed.

        `shared` counts the proposals of all rows that this row learns from.
        """
        if most == 0:
            return np.ones(len(NUMBERS))
        own, prior = self.counts[kind], np.array((kind.accepted, kind.rejected))
        others = np.maximum(shared.counts[kind] - own, 0)
        # If all was right so far, a draft that was mostly wrong elsewhere suits this text better.
        if own[1] or not own[0] or others[0] > others[1]:
            prior = prior + others
        a, b = own + prior * min(1.0, OTHERS / prior.sum())
        # E[alpha^i] for i = 1, 2, …
        powers = np.cumprod([(a + j) / (a + b + j) for j in range(MOST)])
        return np.append(1.0, 1.0 + np.cumsum(powers))[np.minimum(NUMBERS, most)]


@dataclass(frozen=True)
class Plan:
    """What each row proposes in a step: copied tokens, drafted tokens, or nothing.

    Attributes:
        copies: each row's copied tokens.
        drafted: number of tokens that the draft proposes to each row; 0 if the row copies.
        gamma: the largest number of proposals of a row.
        usual: whether the step takes as long as any step with these numbers.
        idle: whether nothing will be proposed to the same rows in the next step either.
    """

    copies: Rows
    drafted: Sequence[int]
    gamma: int
    usual: bool = False
    idle: bool = False


@dataclass
class Adaptive:
    """Chooses for each row whether to propose copied or drafted tokens, and how many.

    Attributes:
        costs: the seconds of steps.
        greedy: the proposals of all greedy rows.
        of_call: the proposals of the sampled rows of a call.
    """

    costs: StepCosts
    greedy: AcceptanceStats = field(default_factory=AcceptanceStats)
    of_call: AcceptanceStats = field(default_factory=AcceptanceStats)

    def new_call(self) -> Adaptive:
        """Returns an `Adaptive` for a new call; both share what they learn from greedy rows."""
        return replace(self, of_call=AcceptanceStats())

    def choose(
        self,
        rows: Sequence[Row],
        copies: Sequence[Copy],
        unread: Sequence[int] | None,
        idle: bool = False,
    ) -> Plan:
        """Chooses what each row proposes in the next step.

        Args:
            rows: the rows.
            copies: the tokens that each row could copy.
            unread: for each row, the number of tokens that the draft has to read before it can
                propose; None without a draft.
            idle: whether the plan of the last step was idle, and the rows are the same.
        """
        # Without NumPy, which is slow for so few numbers.
        has_draft = unread is not None
        numbers, drafts = [0] * len(rows), [False] * len(rows)
        groups = defaultdict[AcceptanceStats, list[int]](list)
        for i, (row, copy) in enumerate(zip(rows, copies, strict=True)):
            if row.settings.num_draft == AUTO:
                groups[self._shared(row)].append(i)
            else:
                numbers[i] = int(row.settings.num_draft)
                drafts[i] = has_draft and (not copy.tokens or copy.kind.alpha < DRAFT.alpha)
        for shared, group in groups.items():
            if not idle:  # else nothing was learned about the draft in the last step
                of_group = [rows[i] for i in group], [copies[i] for i in group]
                number, likelier = self._choose_number(*of_group, has_draft, len(rows))
                for i, by_draft in zip(group, likelier, strict=True):
                    numbers[i], drafts[i] = number, by_draft
            shared.until_trial -= 1
        lengths = [min(n, row.max_proposals) for n, row in zip(numbers, rows, strict=True)]
        drafted = [n if by_draft else 0 for n, by_draft in zip(lengths, drafts, strict=True)]
        copied = [
            [] if by_draft else copy.tokens[:n]
            for copy, n, by_draft in zip(copies, lengths, drafts, strict=True)
        ]
        most_drafted = max(drafted)
        gamma = max(most_drafted, *map(len, copied))
        # Other steps take longer: some rows copy more tokens than others draft, or the draft reads
        # more than a token for a row.
        late = any(n > 1 for n in compress(unread or (), drafted))
        alike = not late and most_drafted in (0, gamma)
        usual = alike and all(row.adapts for row in rows)
        nothing = gamma == 0 and not any(copy.tokens for copy in copies)
        resting = has_draft and all(shared.until_trial > 1 for shared in groups)
        return Plan(copied, drafted, gamma, usual, idle=nothing and resting)

    def _choose_number(
        self, rows: Sequence[Row], copies: Sequence[Copy], has_draft: bool, batch: int
    ) -> tuple[int, Sequence[bool]]:
        """Chooses one number of proposals for rows, and whether the draft makes those of each row.

        The rows learn from the same rows: they are all greedy rows, all sampled rows, or one row
        with delta > 0. `batch` is the number of rows of the step.
        """
        shared = self._shared(rows[0])
        # With delta > 0 the number changes the text, so the batch's other rows must not matter.
        seconds = self.costs.seconds(1 if rows[0].settings.delta else batch, rows[0].adapts)
        copied, drafted = np.ones((2, len(rows), len(NUMBERS)))  # each row's mean tokens
        for i, (row, copy) in enumerate(zip(rows, copies, strict=True)):
            stats, most = row.acceptance, min(len(copy.tokens), row.max_proposals)
            copied[i] = stats.expected_tokens(copy.kind, most, shared)
            if has_draft:
                drafted[i] = stats.expected_tokens(DRAFT, row.max_proposals, shared)
        likelier = drafted > copied
        # In a step with drafts, rows may still copy.
        speeds = speeds_of(np.stack([copied, np.maximum(copied, drafted)]), seconds)
        with_drafts, n = divmod(int(speeds.argmax()), len(NUMBERS))
        could_pay = len(rows) * np.max((NUMBERS + 1) / seconds[1]) > speeds.max()
        if not with_drafts and could_pay and is_trial_due(rows, likelier[:, TRIAL], shared):
            with_drafts, n = True, TRIAL
        if not with_drafts:
            return int(NUMBERS[n]), [False] * len(rows)
        shared.until_trial = TRIAL_STEPS + 1
        return int(NUMBERS[n]), likelier[:, n].tolist()

    def update(
        self, row: Row, copy: Copy, drafted: int, written: Sequence[int], accepted: int
    ) -> None:
        """Learns from the outcome of a step, for a row without a fixed number of proposals.

        Args:
            row: the row after the step.
            copy: the tokens that the row could copy; compared with the text, even if the row did
                not propose them.
            drafted: number of tokens that the draft proposed to the row.
            written: tokens that the step wrote.
            accepted: number of written tokens that were proposals.
        """
        if accepted < drafted:
            row.acceptance.promising = False
        text = written[:-1] if row.ended else written
        equal = [*map(eq, copy.tokens, text)]
        agreed = [*equal, False].index(False)
        fades = {self._shared(row): SHARED_FADE, row.acceptance: FADE}  # with delta > 0, only one
        for kind, kept, proposed in ((DRAFT, accepted, drafted), (copy.kind, agreed, len(equal))):
            if proposed:
                counts = kept, 1 if kept < proposed else 0
                for stats, fade in fades.items():
                    stats.counts[kind] = stats.counts[kind] * fade ** sum(counts) + counts

    def _shared(self, row: Row) -> AcceptanceStats:
        """Returns the counts of all rows that a row learns from."""
        if row.settings.delta:
            return row.acceptance
        return self.greedy if row.adapts else self.of_call


def speeds_of(tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns tokens per second (2, N), from the mean tokens (2, rows, N) of each row's step."""
    speeds = tokens.sum(1) / seconds
    # A gain below 2 % is not worth it. No step is faster than a regular one. It may seem so if
    # regular steps were measured in a slow moment, and then none would be measured again.
    regular = min(seconds[0, 0], seconds.flat[speeds.argmax()])
    speeds[0, 0] = 1.02 * tokens.shape[1] / regular
    return speeds


def is_trial_due(rows: Sequence[Row], likelier: np.ndarray, shared: AcceptanceStats) -> bool:
    """Returns whether to try a draft that does not pay in the rows in which it is `likelier`."""
    promising = [row.acceptance.promising for row in compress(rows, likelier)]
    return bool(promising) and (all(promising) or shared.until_trial <= 1)
