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
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mlx_t5.drafting.costs import MOST, NUMBERS, StepCosts
from mlx_t5.drafting.proposals import NOTHING, Choice, Kind, Offer

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Row

Offers: TypeAlias = Sequence[Sequence[Offer]]  # of each row: at most one draft and one copy

# The weight of an old proposal after each new one. What rows share fades more slowly, or the last
# rows of a batch, often the hardest ones, would decide how the next batch begins.
FADE, SHARED_FADE = 1 - 1 / 80, 1 - 1 / 400
OTHERS = 20.0  # maximum weight of the prior and of other rows, in proposals
TRIAL, TRIAL_STEPS = 2, 24  # proposals of a trial; steps from one trial to the next


class Experience:
    """Counts the proposals of one row, of all greedy rows, or of the sampled rows of a call.

    Attributes:
        counts: numbers of accepted and rejected proposals by kind; older proposals count less.
        rest: number of steps until a draft that does not pay is tried again.
        promising: of one row, whether nothing that the draft proposed has been rejected.
    """

    def __init__(self) -> None:
        """Starts without proposals."""
        self.counts = defaultdict[Kind, np.ndarray](lambda: np.zeros(2))
        self.rest, self.promising = 0, True

    def expected_tokens(self, kind: Kind, most: int, shared: Experience) -> np.ndarray:
        """Returns a step's mean tokens for each of `NUMBERS`, if at most `most` can be proposed.

        `shared` counts the proposals of all rows that this row learns from.
        """
        own, prior = self.counts[kind], np.array((kind.accepted, kind.rejected))
        others = np.maximum(shared.counts[kind] - own, 0)
        # If all was right so far, a draft that was mostly wrong elsewhere suits this text better.
        if own[1] or not own[0] or others[0] > others[1]:
            prior = prior + others
        a, b = own + prior * min(1.0, OTHERS / prior.sum())
        # E[alpha^i] for i = 1, 2, …
        powers = np.cumprod([(a + j) / (a + b + j) for j in range(MOST)])
        return np.append(1.0, 1.0 + np.cumsum(powers))[np.minimum(NUMBERS, most)]


@dataclass
class Adaptive:
    """Chooses for each row whether to propose copied or drafted tokens, and how many.

    Attributes:
        costs: the seconds of steps.
        greedy: the experience of all greedy rows.
        of_call: the experience of the sampled rows of a call.
        shape: the numbers of rows, proposals and draft passes of the step chosen last, so that
            `costs` can learn its seconds; None if `costs` must not learn from that step.
        idle: the rows of the last step, if nothing will be proposed to the same rows in the next.
    """

    costs: StepCosts
    greedy: Experience = field(default_factory=Experience)
    of_call: Experience = field(default_factory=Experience)
    shape: tuple[int, int, int] | None = None
    idle: list[Row] = field(default_factory=list)

    def fresh(self) -> Adaptive:
        """Returns an `Adaptive` for a new call; both share what they learn from greedy rows."""
        return replace(self, of_call=Experience())

    def _shared(self, row: Row) -> Experience:
        return row.experience if row.settings.delta else self.greedy if row.adapts else self.of_call

    def choose(self, rows: Sequence[Row], offers: Offers) -> list[Choice]:
        """Chooses what each row proposes in the next step; sets `shape` and `idle`."""
        choices, groups = [NOTHING] * len(rows), defaultdict[Experience, list[int]](list)
        for i, row in enumerate(rows):
            if not isinstance(number := row.settings.num_draft, int):
                groups[self._shared(row)].append(i)
            elif offers[i]:
                best = max(offers[i], key=lambda o: (o.kind.alpha, not o.kind.drafted))
                choices[i] = best.choice(min(number, row.room))
        for shared, group in groups.items():
            if rows != self.idle:  # else nothing was learned about the draft in the last step
                self._choose(group, rows, offers, choices)
            shared.rest -= 1
        gamma, passes = max(c.length for c in choices), max(c.passes for c in choices)
        late = any(c.passes and o[-1].unread > 1 for c, o in zip(choices, offers, strict=True))
        usual = all(row.adapts for row in rows) and passes in (0, gamma) and not late
        self.shape = (len(rows), gamma, passes) if usual else None
        only_drafts = all(len(o) == 1 and o[0].kind.drafted for o in offers)
        idle = gamma == 0 and only_drafts and all(shared.rest > 1 for shared in groups)
        self.idle = list(rows) if idle else []
        return choices

    def _choose(
        self, group: Sequence[int], rows: Sequence[Row], offers: Offers, choices: list[Choice]
    ) -> None:
        """Chooses one number of proposals for some rows, and the better offer for each of them.

        `group` has the indices of all greedy rows, all sampled rows, or one row with delta > 0.
        """
        lead, shared = rows[group[0]], self._shared(rows[group[0]])
        # With delta > 0 the number changes the text, so the batch's other rows must not matter.
        seconds = self.costs.seconds(1 if lead.settings.delta else len(rows), lead.adapts)
        best: dict[tuple[int, bool], Offer] = {}
        tokens = np.ones((2, len(group), len(NUMBERS)))  # of each row, if it copies or drafts
        for k, i in enumerate(group):
            for offer in offers[i]:
                kind, most = offer.kind, offer.choice(rows[i].room).length
                expected = rows[i].experience.expected_tokens(kind, most, shared)
                best[k, kind.drafted], tokens[int(kind.drafted), k] = offer, expected
        tokens[1] = tokens.max(0)  # in a step with drafts, rows may still copy
        wins = tokens[1] > tokens[0]
        speeds = tokens.sum(1) / seconds
        # A gain below 2 % is not worth it. No step is faster than a regular one. It may seem so if
        # regular steps were measured in a slow moment, and then none would be measured again.
        speeds[0, 0] = 1.02 * len(group) / min(seconds[0, 0], seconds.flat[speeds.argmax()])
        drafts, n = divmod(int(speeds.argmax()), len(NUMBERS))
        new = [rows[i].experience.promising for k, i in enumerate(group) if wins[k, TRIAL]]
        could_pay = len(group) * np.max((NUMBERS + 1) / seconds[1]) > speeds.max()
        if not drafts and could_pay and new and (shared.rest <= 1 or all(new)):
            drafts, n = 1, TRIAL
        shared.rest = TRIAL_STEPS + 1 if drafts else shared.rest
        for k, i in enumerate(group):
            if chosen := best.get((k, bool(drafts and wins[k, n]))):
                choices[i] = chosen.choice(min(int(NUMBERS[n]), rows[i].room))

    def note(
        self, row: Row, offers: Sequence[Offer], drafted: int, written: list[int], accepted: int
    ) -> None:
        """Learns from the outcome of a row's offers, if the row has no fixed number of proposals.

        An offer of copied tokens is compared with the text, even if the row did not choose it.

        Args:
            row: the row after the step.
            offers: the row's offers in the step.
            drafted: number of tokens that the draft proposed to the row in the step.
            written: tokens that the step wrote.
            accepted: number of written tokens that were proposals.
        """
        row.experience.promising &= accepted >= drafted
        text = written[: len(written) - row.ended]
        for kind, tokens, _ in offers:
            right, wrong = accepted * bool(drafted), accepted < drafted
            if tokens is not None:  # known without a draft, so judged even if not proposed
                same = [a == b for a, b in zip(tokens, text, strict=False)]
                right, wrong = int(np.cumprod(same).sum()), not all(same)
            for seen in {row.experience, self._shared(row)}:
                fade = FADE if seen is row.experience else SHARED_FADE
                seen.counts[kind] = seen.counts[kind] * fade ** (right + wrong) + (right, wrong)
