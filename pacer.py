"""Paces the drafting of a batch: learns how good proposals are and says how many to ask for.

How good they are depends on the task, so what is learned is kept by task prefix ("fix grammar:").
Copies that were found are judged whether they were proposed or not: what the target wrote instead
is known. Where they do not pay they are looked for less and less often. A draft model has to be
tried. While it is not asked, a small share of the time of every step is put aside, and when the
savings cover what a trial can cost, every row gets one drafted token. The time that those of them
save which are kept is put back.

Two rules keep outputs reproducible. What greedy rows write does not depend on how many proposals
they get, so they may learn from each other and share one choice, the best for the batch as it is.
What a sampled row writes does depend on it (a token that was proposed is drawn in another way than
one that was not). So its choice follows from its own past alone, and from costs that are fixed for
the whole run: those of a full batch, however many rows happen to be beside it. And as it cannot
agree on a length with the others, each takes the same usual one or none.

Formulas and symbols: draft_length.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draft_length import (
    LONGEST,
    Costs,
    Estimate,
    StepCosts,
    best_for_one,
    best_lengths,
    expected_tokens,
    foresee,
    judge,
    usual_for_one,
)
from drafters import NOTHING, Offer
from pace import History, Lesson, Pace, Purse

UNKNOWN_COSTS = 5  # proposals where nothing is known of the costs
# Alpha before anything was judged, and how many judgements that is worth, by kind of proposal.
PRIORS = {
    "draft": (0.85, 5.0),
    "copy": (0.85, 5.0),
    "weak copy": (0.25, 3.0),
    "first copy": (0.4, 3.0),  # near 0.9 where texts are corrected, near 0.1 where translated
}
ROW_WEIGHT = 40.0  # the same for what earlier rows of a task say about a new one
SHARED_WEIGHT = 30.0  # and of the prior where sampled rows share steps, less what was judged
MEMORY, ROW_MEMORY = 240.0, 60.0  # judgements
HOLD = 3  # steps for which a number of drafted tokens is kept before it is thought over
LONGEST_REST = 15  # steps without looking where to copy from, after looking in vain many times


class Pacer:
    """Chooses lengths for the rows of one batch."""

    def __init__(
        self, costs: Costs | None = None, width: int = 1, history: History | None = None
    ) -> None:
        """Starts with what is known.

        Args:
            costs: of steps on this machine; None if unknown, `UNKNOWN_COSTS` are proposed then.
            width: rows of a full batch.
            history: of greedy rows that came before; kept up to date.
        """
        self.costs, self.width = costs, width
        self.history = History() if history is None else history
        self.steps = 0  # begun

    def choose(self, paces: Sequence[Pace], offers: Sequence[Sequence[Offer]]) -> list[Offer]:
        """Which offer each row should take up in the next step, and how much of it.

        Args:
            paces: of all rows of the batch.
            offers: to each of them.
        """
        if self.costs is None:
            return [row[0].cut(UNKNOWN_COSTS) if row else NOTHING for row in offers]
        chosen = [NOTHING] * len(paces)
        together = [i for i, pace in enumerate(paces) if not pace.sampled]
        groups = [(together, self.costs.of(len(paces)), self.history.purse)] if together else []
        full = self.costs.of(self.width)
        groups += [([i], full, pace.purse) for i, pace in enumerate(paces) if pace.sampled]
        for group, costs, purse in groups:
            theirs, picks = [offers[i] for i in group], [NOTHING] * len(group)
            if any(theirs):
                picks = self._pick([paces[i] for i in group], theirs, costs, purse)
            for i, offer in zip(group, picks, strict=True):
                chosen[i] = offer
                if not paces[i].rest:
                    self._rest(paces[i], in_vain=offer.tokens is None or not offer.length)
        return chosen

    def resting(self, paces: Sequence[Pace]) -> list[int]:
        """The rows that need no copies offered in this step, by place; to be asked once a step.

        Looking where to copy from takes time as well, and where copies do not pay now they will
        hardly do so at the next token, unless a text has just begun.
        """
        self.steps += 1
        for pace in paces:
            pace.rest = max(pace.rest - 1, 0)
        return [i for i, pace in enumerate(paces) if pace.rest]

    def _rest(self, pace: Pace, in_vain: bool) -> None:
        """Has a row that has looked do so the less often, the more often that was in vain.

        A greedy row goes on from where the last one of its task was, and looks when others do: in
        every second step, or every fourth, and so on. So most steps are free of it altogether.
        """
        past = pace if pace.sampled else self.history.of(pace.task)
        before = past.pause if pace.pause is None else pace.pause
        longer = 0 if before is None else min(2 * before + 1, LONGEST_REST)
        pace.pause = past.pause = longer if in_vain else None
        since = 0 if pace.sampled else self.steps % (longer + 1)
        pace.rest = longer + 1 - since if in_vain else 0

    def observe(
        self,
        paces: Sequence[Pace],
        offers: Sequence[Sequence[Offer]],
        chosen: Sequence[Offer],
        written: Sequence[tuple[Sequence[int], int, bool]],
    ) -> None:
        """Takes note of a step, for `learn`.

        Args:
            paces: of all rows that took part.
            offers: to each of them.
            chosen: what each took up.
            written: the tokens each got, how many of them were proposals, and whether its text
                ended.
        """
        drafted = max(offer.length if offer.tokens is None else 0 for offer in chosen)
        longest = max(offer.length for offer in chosen)
        step = len(paces), min(drafted, LONGEST), min(longest, LONGEST)
        for pace, row, offer, outcome in zip(paces, offers, chosen, written, strict=True):
            pace.lesson = Lesson(*step, row, offer, self._purse(pace).worth, *outcome)

    def learn(self, paces: Iterable[Pace]) -> None:
        """Has rows learn from the last step that was observed, if they have not yet.

        Not part of `observe`, as there is time for it while the device does the next step.
        """
        for pace in paces:
            lesson, pace.lesson = pace.lesson, None
            if lesson is None:
                continue
            if self.costs is not None:
                self._book(pace, lesson)
            self._purse(pace).earn(lesson.accepted * lesson.worth)
            chosen, tokens, ended = lesson.chosen, lesson.tokens, lesson.ended
            if chosen.length:
                counts = judge(chosen.length, lesson.accepted, len(tokens), ended)
                self._learn(pace, chosen.kind, counts)
            for other in lesson.offers:
                if other.tokens is not None and not (chosen.length and other.kind == chosen.kind):
                    self._learn(pace, other.kind, foresee(other.tokens, tokens, ended))

    def _pick(
        self,
        paces: Sequence[Pace],
        offers: Sequence[Sequence[Offer]],
        costs: StepCosts,
        purse: Purse,
    ) -> list[Offer]:
        """The offers that the rows of a group take up, chosen together."""
        models = [_first(row, model=True) for row in offers]
        copies = [_first(row, model=False) for row in offers]
        if purse.hold and not any(offer.length for offer in copies):
            purse.hold -= 1
            return [model.cut(purse.last[0]) for model in models]
        by_draft, by_copy = (self._outlooks(paces, kind) for kind in (models, copies))
        draft, copy = self._lengths(paces[0].sampled, by_draft, by_copy, costs, purse.last)
        purse.last, purse.worth = (draft, copy), 0.0
        purse.hold = 0 if copy or not draft else HOLD
        if not draft and not costs.hopeless and any(offer.length for offer in models):
            # A trial may yield no more than a regular step; besides, the draft has to catch up.
            step = costs.table[0, copy]
            worth = step * len(paces) / sum(expected_tokens(a, min(copy, r)) for a, r in by_copy)
            if purse.pays(costs.table[1, 0] + costs.draft - worth, worth / len(paces), step):
                return [model.cut(1) for model in models]
        for pace, row in zip(paces, offers, strict=True):
            if draft or copy:
                pace.off = None
            elif not pace.off and any(offer.length for offer in row):
                pace.off = self._reason(self._alpha(pace, row[0].kind), costs)
        if not copy:
            return [model.cut(draft) for model in models] if draft else [NOTHING] * len(paces)
        drafting = [
            expected_tokens(a, min(draft, m)) > expected_tokens(b, min(copy, n))
            for (a, m), (b, n) in zip(by_draft, by_copy, strict=True)
        ]
        return [
            model.cut(draft) if wins else other.cut(copy)
            for wins, model, other in zip(drafting, models, copies, strict=True)
        ]

    def _lengths(
        self,
        sampled: bool,
        by_draft: Sequence[tuple[float, int]],
        by_copy: Sequence[tuple[float, int]],
        costs: StepCosts,
        last: tuple[int, int],
    ) -> tuple[int, int]:
        """How many to draft and how many to copy."""
        if sampled and self.width > 1:
            return usual_for_one(by_draft[0], by_copy[0], costs)
        if len(by_draft) == 1:
            return best_for_one(by_draft[0], by_copy[0], costs, last)
        return best_lengths(by_draft, by_copy, costs, last)

    def _outlooks(self, paces: Sequence[Pace], offers: Sequence[Offer]) -> list[tuple[float, int]]:
        """Each row's alpha of what it is offered, and how much of it can count."""
        return [
            (self._alpha(pace, offer.kind), min(offer.length, LONGEST))
            if offer.length
            else (0.0, 0)
            for pace, offer in zip(paces, offers, strict=True)
        ]

    def _purse(self, pace: Pace) -> Purse:
        return pace.purse if pace.sampled else self.history.purse

    def _alpha(self, pace: Pace, kind: str) -> float:
        prior, weight = PRIORS.get(kind, PRIORS["draft"])
        if not pace.sampled:
            past = self.history.of(pace.task).estimates.get(kind)
            prior, weight = past.alpha(prior, weight) if past else prior, ROW_WEIGHT
        own = pace.estimates.get(kind)
        if not own:
            return prior
        if pace.sampled and self.width > 1 and kind == "draft":
            weight = max(weight, SHARED_WEIGHT - own.judged)
        return own.alpha(prior, weight)

    def _learn(self, pace: Pace, kind: str, counts: tuple[int, int]) -> None:
        judged, kept = counts
        if judged:
            pace.estimates.setdefault(kind, Estimate(ROW_MEMORY)).add(judged, kept)
            if not pace.sampled:
                past = self.history.of(pace.task).estimates
                past.setdefault(kind, Estimate(MEMORY)).add(judged, kept)

    def _book(self, pace: Pace, lesson: Lesson) -> None:
        """Adds what a step costs and what it promised to a row's sums."""
        costs, chosen = self.costs.of(lesson.rows), lesson.chosen
        alpha = self._alpha(pace, chosen.kind) if chosen.length else 0.0
        pace.steps += 1
        pace.regular += costs.regular
        pace.promised += costs.regular * expected_tokens(alpha, chosen.length)
        pace.spent += costs.table[lesson.drafted, lesson.longest]
        pace.c += costs.draft / costs.regular
        pace.verify += costs.verify[lesson.longest] / costs.regular

    def _reason(self, alpha: float, costs: StepCosts) -> str:
        """One line on why nothing is proposed."""
        if costs.hopeless:
            return f"proposals cost more than they can save: {costs.price}"
        return f"too few proposals are kept: alpha {alpha:.2f}; {costs.price}"


def _first(offers: Iterable[Offer], model: bool) -> Offer:
    """The first that is of a model, or is not."""
    return next((offer for offer in offers if (offer.tokens is None) == model), NOTHING)
