"""Paces the drafting of a batch: learns how good proposals are and says how many to ask for.

Two rules keep outputs reproducible. What greedy rows write does not depend on how many proposals
they get, so they may learn from each other and share one choice, the best for the batch as it is.
What a sampled row writes does depend on it (a token that was proposed is drawn in another way than
one that was not). So its choice follows from its own past alone, and from costs that are fixed for
the whole run: those of a full batch, however many rows happen to be beside it.

When no length is worth its cost a row gets no proposals, except for probes of one token: a row puts
aside a small share of each regular step, and a probe is made when the savings cover it. A probe
that is kept has paid for itself and the next one follows at once; after one that is not the
next has to wait twice as long as before.

Formulas and symbols: draft_length.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_length import (
    Costs,
    Estimate,
    Outlook,
    StepCosts,
    best_lengths,
    break_even,
    expected_tokens,
)

UNKNOWN_COSTS = 5  # proposals where nothing is known of the costs
DRAFT = "draft"  # the kind of proposals that a model is asked for
PRIOR = 0.7  # alpha before anything was judged
PRIOR_WEIGHT = 2.0  # judgements it counts as much as
ROW_WEIGHT = 4.0  # the same for what earlier rows say about a new one
ROW_MEMORY, HISTORY_MEMORY = 60.0, 200.0  # judgements
PROBE_SHARE = 0.03  # of the time of regular steps, spent on probes at most
PATIENCE = 4  # a probe waits at most so many times the savings that cover it


@dataclass
class Pace:
    """What one row has learned and where its time went.

    Attributes:
        estimates: of alpha, by kind of proposal.
        kind: of the next proposals; "" while lengths are fixed.
        sampled: whether the row's output depends on how many proposals it gets.
        behind: committed tokens that the draft model has not read, at least 1.
        savings: seconds put aside for probes.
        patience: how many times over the savings have to cover the next probe, except for what
            the draft model has to catch up with.
        probe: seconds that this step's probe costs the row, None if it makes none.
        off: why it gets no proposals, None if it does.
        steps: steps whose costs are known. What follows are sums over them:
        regular: seconds that one regular step of the batch takes.
        promised: seconds in which regular decoding writes the tokens that were expected.
        spent: seconds that the steps were expected to take.
        c, verify: costs of a draft pass and of verifying, relative to a regular step.
    """

    estimates: dict[str, Estimate] = field(default_factory=dict)
    kind: str = ""
    sampled: bool = False
    behind: int = 1
    savings: float = 0.0
    patience: int = 1
    probe: float | None = None
    off: str | None = None
    steps: int = 0
    regular: float = 0.0
    promised: float = 0.0
    spent: float = 0.0
    c: float = 0.0
    verify: float = 0.0

    def settle(self, kept: int, gain: float) -> None:
        """Pays for a probe: a token that was kept saved `gain` seconds of regular decoding."""
        if kept:
            self.savings = min(self.savings - self.probe + gain, self.probe * PATIENCE)
            self.patience = 1
        else:
            self.savings -= self.probe
            self.patience = min(2 * self.patience, PATIENCE)


class Pacer:
    """Chooses lengths for the rows of one batch."""

    def __init__(
        self,
        costs: Costs | None = None,
        width: int = 1,
        history: dict[str, Estimate] | None = None,
    ) -> None:
        """Starts with what is known.

        Args:
            costs: of passes on this machine; None if unknown, `UNKNOWN_COSTS` are proposed then.
            width: rows of a full batch.
            history: estimates of greedy rows that came before, by kind; kept up to date.
        """
        self.costs, self.width = costs, width
        self.history = {} if history is None else history
        self._tables: dict[int, StepCosts] = {}
        self._break_even: dict[tuple[int, bool], float | None] = {}

    def lengths(
        self,
        paces: Sequence[Pace],
        kinds: Sequence[str],
        rooms: Sequence[int],
        sampled: Sequence[bool],
    ) -> list[int]:
        """How many proposals each row should get in the next step.

        Args:
            paces: of all rows of the batch.
            kinds: what would be proposed for each: "draft", "copy" or "weak copy".
            rooms: tokens each row can use at most.
            sampled: whether each is sampled, so that its output depends on the answer.
        """
        count = len(paces)
        for pace, kind, is_sampled in zip(paces, kinds, sampled, strict=True):
            pace.kind, pace.sampled = kind, is_sampled
        if self.costs is None:
            return [UNKNOWN_COSTS] * count
        chosen = [0] * count
        together = [i for i in range(count) if not sampled[i]]
        groups = [(together, count)] if together else []
        groups += [([i], self.width) for i in range(count) if sampled[i]]
        for group, rows in groups:
            outlooks = [
                Outlook(self._alpha(paces[i], kinds[i]), rooms[i], kinds[i] != DRAFT) for i in group
            ]
            lengths = self._choose([paces[i] for i in group], outlooks, self._table(rows))
            for i, length in zip(group, lengths, strict=True):
                chosen[i] = min(length, rooms[i])
        return chosen

    def observe(
        self,
        paces: Sequence[Pace],
        lengths: Sequence[int],
        writers: Sequence[str],
        judged: Sequence[tuple[int, int]],
    ) -> None:
        """Learns from a step.

        Args:
            paces: of all rows that took part.
            lengths: how many proposals each got.
            writers: who proposed them, "draft" or "copy".
            judged: how many of them count, as the text may end before, and how many were kept.
        """
        drafts = [n for n, w in zip(lengths, writers, strict=True) if w == DRAFT]
        by_model, longest = max(drafts, default=0), max(lengths)
        for i, (pace, (drafted, kept)) in enumerate(zip(paces, judged, strict=True)):
            kind = pace.kind if pace.kind else writers[i]
            if self.costs is not None:
                alpha = self._alpha(pace, kind)
                self._book(pace, alpha, lengths[i], by_model, longest, len(paces))
            if pace.probe is not None:
                full = self._table(self.width if pace.sampled else len(paces))
                pace.settle(kept, full.verify[0] / full.rows)
            if drafted:
                known = pace.estimates.setdefault(kind, Estimate(ROW_MEMORY))
                if pace.probe is not None and kept:
                    known.doubt()
                known.add(drafted, kept)
                if not pace.sampled:
                    self.history.setdefault(kind, Estimate(HISTORY_MEMORY)).add(drafted, kept)
            pace.behind = 1 if by_model else pace.behind + kept + 1

    def _alpha(self, pace: Pace, kind: str) -> float:
        prior = PRIOR
        if not pace.sampled and kind in self.history:
            prior = self.history[kind].alpha(PRIOR, PRIOR_WEIGHT)
        known = pace.estimates.get(kind)
        return known.alpha(prior, ROW_WEIGHT) if known else prior

    def _table(self, rows: int) -> StepCosts:
        if rows not in self._tables:
            self._tables[rows] = self.costs.of(rows)
        return self._tables[rows]

    def _choose(
        self, group: Sequence[Pace], outlooks: Sequence[Outlook], costs: StepCosts
    ) -> list[int]:
        """Lengths of the rows of a group, chosen together."""
        draft, copy, _ = best_lengths(outlooks, costs)
        for pace in group:
            pace.probe = None
        if draft or copy:
            for pace in group:
                pace.savings, pace.patience, pace.off = 0.0, 1, None
            return [copy if outlook.free else draft for outlook in outlooks]
        for pace, outlook in zip(group, outlooks, strict=True):
            if outlook.room:
                pace.off = self._reason(outlook, costs)
        return [int(self._probe(group, outlooks, costs))] * len(group)

    def _probe(self, group: Sequence[Pace], outlooks: Sequence[Outlook], costs: StepCosts) -> bool:
        """Whether a group that gets no proposals should try one in this step."""
        if all(self._needed(costs, outlook.free) is None for outlook in outlooks):
            return False
        for pace in group:
            pace.savings += PROBE_SHARE * costs.verify[0] / costs.rows
        usual = price = max(costs.verify[1] - costs.verify[0], 0.0)
        if not all(outlook.free for outlook in outlooks):
            usual += costs.draft
            price += costs.catch_up(max(pace.behind for pace in group))
        # What the draft has missed grows with the wait, so only the rest counts several times.
        needed = price + (max(pace.patience for pace in group) - 1) * usual
        savings = sum(pace.savings for pace in group)
        if savings < needed or not any(outlook.room for outlook in outlooks):
            return False
        for pace in group:
            pace.probe = price / len(group)
        return True

    def _book(
        self, pace: Pace, alpha: float, length: int, by_model: int, longest: int, rows: int
    ) -> None:
        """Adds what a step cost and what it promised to a row's sums."""
        costs = self._table(rows)
        regular, verify = costs.verify[0], costs.verify[min(longest, costs.longest)]
        pace.steps += 1
        pace.regular += regular
        pace.promised += expected_tokens(alpha, length) * regular
        pace.spent += by_model * costs.draft + verify
        pace.c += costs.draft / regular
        pace.verify += verify / regular

    def _needed(self, costs: StepCosts, free: bool) -> float | None:
        key = (costs.rows, free)
        if key not in self._break_even:
            self._break_even[key] = break_even(costs, free)
        return self._break_even[key]

    def _reason(self, outlook: Outlook, costs: StepCosts) -> str:
        """One line on why nothing is proposed."""
        needed = self._needed(costs, outlook.free)
        if needed is None:
            ratio = costs.verify[1] / costs.verify[0]
            c = costs.draft / costs.verify[0]
            return f"proposals cost more than they can save: c {c:.2f}, v(2)/v(1) {ratio:.2f}"
        return f"too few proposals are kept: alpha {outlook.alpha:.2f}, {needed:.2f} would pay"
