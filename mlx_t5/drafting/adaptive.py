"""Chooses how many tokens to propose to each row in a step.

If each proposal is accepted with probability alpha, a step with gamma proposals yields
1 + alpha + … + alpha^gamma tokens on average. `Adaptive` chooses the gamma, possibly 0, that gives
the most tokens per second. It learns the duration of a step by timing the steps (costs.py), and
alpha by counting the accepted proposals of each kind in each row. All rows of a batch share a step,
so its duration counts once for the whole batch.

A few proposals say little about alpha, so alpha is modelled by a beta distribution: after a
accepted and b rejected proposals, E[alpha^i] = product over j < i of (a + j) / (a + b + j).

With delta = 0 the proposals change a text only by rounding. Greedy rows, where rounding hardly
matters, learn from each other and from the clock. Sampled rows learn only from the rows of the same
call and use the table of costs, so that a command gives the same text on every run. With delta > 0
the draft influences the text, so gamma depends only on the row's own acceptances and the table.

Symbols: B rows, gamma proposals, N values of gamma that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlx_t5.drafting.costs import MOST, Expected, Grid, Shape, StepCosts, grid, most_proposals
from mlx_t5.drafting.experience import Experience
from mlx_t5.drafting.proposals import NOTHING, Choice, Drafter, Offer
from mlx_t5.network.exact import ExactTarget
from mlx_t5.network.exactness import LONGEST_AUTO
from mlx_t5.settings import AUTO

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Row
    from model import T5

NUMBERS = (*range(9), 10, 12, MOST)  # the values of gamma that are compared
FIRST = 7  # maximum of proposals until more than 7 have been accepted
KEPT = 3  # steps for which a choice is kept, as choosing takes time
LEAST_GAIN = 1.02  # smaller ratios between two estimated speeds are ignored
EVIDENCE = 12.0  # verified proposals after which `KEPT` and `LEAST_GAIN` apply


class Plan(NamedTuple):
    """A choice that is kept: these rows get `number` draft tokens while `experience.wait` > 0."""

    rows: Sequence[Row]
    number: int
    experience: Experience


class Adaptive:
    """Chooses an offer for each row, and how many of the offer's tokens to propose."""

    def __init__(self, expected: Expected, most: int | None = None) -> None:
        """Starts with expected costs and a maximum of proposals per row; None: the default."""
        self.expected, self.costs = expected, StepCosts(expected.seconds)
        self.table = StepCosts(partial(expected.seconds, sampled=True))  # never updated
        self.most = most_proposals() if most is None else most
        self.experience, self.of_call = Experience(), Experience()
        self._caught_up = False  # whether the draft reads tokens of earlier steps in this step
        self._plan = Plan([], 0, self.experience)

    @classmethod
    def of(cls, target: T5, drafter: Drafter | None) -> Adaptive:
        """Returns an `Adaptive` for a target, or its `ExactTarget`, and its drafter."""
        most = LONGEST_AUTO if isinstance(target, ExactTarget) else None
        return cls(Expected(target, drafter.model if drafter else None), most)

    def fresh(self) -> Adaptive:
        """Returns an `Adaptive` for a new call; both share the experience of greedy rows."""
        other = copy(self)
        other.of_call = Experience()
        other._plan = Plan([], 0, other.of_call)
        return other

    def choose(self, rows: Sequence[Row], offers: Sequence[Sequence[Offer]]) -> list[Choice]:
        """Returns each row's choice for the next step: an offer, and a number of its tokens."""
        plan = self._plan
        if rows is plan.rows and plan.experience.wait > 0 and not known(offers):
            plan.experience.rest()
            self._caught_up = False
            return [
                offered[0].first(min(plan.number, row.room)) if offered else NOTHING
                for row, offered in zip(rows, offers, strict=True)
            ]
        choices = [NOTHING] * len(rows)
        lenient: list[int] = []
        drawn: list[int] = []
        greedy: list[int] = []
        for i, (row, offered) in enumerate(zip(rows, offers, strict=True)):
            number = row.settings.num_draft
            if not (offered and number and row.room):
                continue
            if isinstance(number, int):
                best = max(offered, key=lambda offer: (offer.kind.alpha, not offer.kind.drafted))
                choices[i] = best.first(min(number, row.room))
            else:
                (greedy if row.adapts else lenient if row.settings.delta else drawn).append(i)
        for group in (*([i] for i in lenient), drawn, greedy):
            if group:
                self._choose(group, rows, offers, choices)
        alike = len(rows) in (len(drawn), len(greedy)) and not known(offers)
        number = max(choice.drafted for choice in choices)
        experience = self._learner(rows[0])
        self._plan = Plan(rows if alike else [], number, experience)
        return choices

    def rests(self, rows: Sequence[Row]) -> bool:
        """Returns whether the next step will not use the draft, if the rows stay the same."""
        plan = self._plan
        return rows is plan.rows and not plan.number and plan.experience.wait > 0

    def _choose(
        self,
        indices: Sequence[int],
        rows: Sequence[Row],
        offers: Sequence[Sequence[Offer]],
        choices: list[Choice],
    ) -> None:
        """Sets the choices of all greedy rows, of all sampled rows, or of one lenient row."""
        first = rows[indices[0]]
        learns, seen = first.adapts, self._learner(first)
        options = Options.of(indices, rows, offers, seen, self.most)
        shapes = options.shapes(1) if first.settings.delta else options.shapes(len(rows), choices)
        decided = self._decide(options, self.costs if learns else self.table, shapes, seen)
        self._caught_up = learns and options.unread > 1 and decided[0] > 0
        options.take(decided, choices)

    def _decide(
        self, options: Options, costs: StepCosts, shapes: Grid, experience: Experience
    ) -> tuple[int, int]:
        """Returns two indices of `NUMBERS`, for drafts and copies, with the most tokens per second.

        Sometimes it tries different numbers: a draft that was too slow may pay by now, and a number
        that seems nearly as good may take less time than the table says.

        Args:
            options: the rows' options.
            costs: the estimated seconds of steps.
            shapes: the shapes of the possible steps.
            experience: the rows' experience; its credit limits the trials.
        """
        proven = experience.verified >= EVIDENCE
        experience.wait = KEPT if proven and len(options.tokens[0]) > 1 else 0
        experience.income = 0.0
        tokens, seconds = options.tokens.sum(axis=0), costs.seconds(shapes)
        speeds = tokens / seconds
        near = speeds >= speeds.max() / (LEAST_GAIN if proven else 1.0)
        d, m = divmod(int(np.where(near, seconds, np.inf).argmin()), speeds.shape[1])
        prices = seconds - tokens / speeds[d, m]  # seconds lost with each choice
        others = [(n, m) for n in range(1, len(speeds))]
        if d == 0:
            prices = prices + self.expected.catching_up(shapes.rows, options.unread)
        else:
            others = [n for n in others if abs(n[0] - d) == 1]
            others = [n for n in others if costs is self.costs and costs.is_new(shapes, *n)]
        if others:
            other = min(others, key=prices.__getitem__)
            if experience.affords(float(prices[other]), float(seconds[d, m])):
                d, m = other
        if d:
            new = costs is self.costs and costs.is_new(shapes, d, m)
            experience.wait = 0 if new else min(experience.wait, KEPT)
        return d, m

    def note(
        self, row: Row, offers: Sequence[Offer], choice: Choice, written: list[int], accepted: int
    ) -> None:
        """Learns from the outcome of a row's offers.

        Args:
            row: the row after the step.
            offers: its offers in the step.
            choice: the offer that was chosen for it, and the number of tokens.
            written: tokens that the step wrote.
            accepted: number of written tokens that were proposals.
        """
        if row.settings.num_draft != AUTO:
            return
        text = written[: len(written) - row.ended]
        for kind, tokens, _ in offers:
            if tokens is not None:  # known without a draft, so judged even if not proposed
                counts = compare(tokens, text)
            elif choice.drafted:
                ended = row.finish_reason == "stop"
                counts = count_verified(choice.length, accepted, len(written), ended)
            else:
                continue
            row.experience.outcomes[kind].add(*counts)
            if (learner := self._learner(row)) is not row.experience:
                learner.outcomes[kind].add(*counts)

    def _learner(self, row: Row) -> Experience:
        """Returns the experience that a row uses: of all greedy rows, of its call, or its own."""
        if row.adapts:
            return self.experience
        return row.experience if row.settings.delta else self.of_call

    def shape(self, rows: Sequence[Row], choices: Sequence[Choice]) -> Shape | None:
        """Returns the step's shape; None if its duration is not to be learned."""
        if self._caught_up or not all(row.adapts for row in rows):
            return None
        positions = 1 + max(choice.length for choice in choices)
        return len(rows), positions, max(choice.drafted for choice in choices)

    def timed(self, shape: Shape | None, seconds: float) -> None:
        """Learns the duration of a step from its `shape`; does nothing if that is None."""
        if shape:
            self.costs.note(*shape, seconds)


@dataclass(frozen=True)
class Options:
    """The possible proposals for some rows of a batch, and the tokens expected from them.

    Attributes:
        indices: the rows' indices in the batch.
        offers: for each row, its offer of draft tokens and its offer of copied tokens, or None.
        rooms: maximum of proposals of each row.
        tokens: (B, N, N) expected tokens of each row, by the number of draft tokens (axis 1) and of
            copied tokens (axis 2); an axis without offers has only the entry for 0.
    """

    indices: Sequence[int]
    offers: Sequence[tuple[Offer | None, Offer | None]]
    rooms: Sequence[int]
    tokens: np.ndarray

    @classmethod
    def of(
        cls,
        indices: Sequence[int],
        rows: Sequence[Row],
        offers: Sequence[Sequence[Offer]],
        others: Experience,
        most: int,
    ) -> Options:
        """Returns the options of rows, with at most `most` proposals per row.

        The expected tokens are estimated from each row's experience and from `others`.
        """
        numbers = [number for number in NUMBERS if number <= most]
        pairs, rooms = [], [rows[i].room for i in indices]
        for i in indices:
            by_draft = {offer.kind.drafted: offer for offer in offers[i]}
            pairs.append((by_draft.get(True), by_draft.get(False)))
        axes = []
        for offered in zip(*pairs, strict=True):
            tokens = [[1.0]] * len(indices)
            if any(offered):
                tokens = [[1.0] * len(numbers)] * len(indices)
            for place, (i, offer, room) in enumerate(zip(indices, offered, rooms, strict=True)):
                if offer:
                    belief = rows[i].experience.belief(offer.kind, others)
                    cap = min(offer.most(room), max(FIRST, int(belief[0])))
                    tokens[place] = expected_tokens(belief, cap, numbers)
            axes.append(np.array(tokens))
        drafts, copies = axes
        return cls(indices, pairs, rooms, np.maximum(drafts[:, :, None], copies[:, None, :]))

    @property
    def unread(self) -> int:
        """The largest number of tokens of a row that the draft has not read yet."""
        return max((drafted.unread for drafted, _ in self.offers if drafted), default=0)

    def shapes(self, rows: int, others: Sequence[Choice] = ()) -> Grid:
        """Returns the possible shapes of a step of `rows` rows; `others` are fixed choices."""
        drafts, copies = (NUMBERS[:n] for n in self.tokens.shape[1:])
        longest = max((choice.length for choice in others), default=0)
        return grid(rows, drafts, copies, longest, max((c.drafted for c in others), default=0))

    def take(self, decided: tuple[int, int], choices: list[Choice]) -> None:
        """Enters the rows' choices in `choices`, given the indices that `_decide` returned."""
        d, m = decided
        rows = zip(self.indices, self.offers, self.rooms, self.tokens, strict=True)
        for i, (draft, copied), room, tokens in rows:
            prefer = copied if tokens[0, m] >= tokens[d, 0] else draft
            number = NUMBERS[m if prefer is copied else d]
            if prefer and number:
                choices[i] = prefer.first(min(number, room))


def known(offers: Sequence[Sequence[Offer]]) -> bool:
    """Returns whether the tokens of any offer are known without running a draft model."""
    return any(offer.tokens for offered in offers for offer in offered)


def expected_tokens(belief: tuple[float, float], cap: int, numbers: Sequence[int]) -> list[float]:
    """Returns the expected tokens (N,) of a step, for each number of proposals.

    Args:
        belief: a and b of the beta distribution of alpha.
        cap: maximum of proposals of the row.
        numbers: (N,) numbers of proposals, ascending.
    """
    a, b = belief
    tokens, chance = [1.0], 1.0
    for i in range(min(cap, numbers[-1])):
        chance *= (a + i) / (a + b + i)
        tokens.append(tokens[-1] + chance)
    return [tokens[min(n, len(tokens) - 1)] for n in numbers]


def count_verified(proposed: int, accepted: int, written: int, ended: bool) -> tuple[int, int]:
    """Counts the proposals of a step from which alpha is estimated.

    A proposal succeeds if it made the step longer. If proposals follow the end of the text, one of
    them counts as rejected. A proposed end token at the end does not count, as the target would
    have written it anyway.

    Args:
        proposed: number of proposals.
        accepted: number of proposals that are part of the text.
        written: number of tokens that the step wrote, the target's own token included.
        ended: whether the written tokens ended the text.

    Returns:
        The number of proposals verified, and the number of proposals that made the step longer.
    """
    useful = min(accepted, written - 1)
    if ended and proposed == accepted == written:
        return useful, useful
    return useful + (proposed > useful), useful


def compare(copy: Sequence[int], written: Sequence[int]) -> tuple[int, int]:
    """Returns the counts of `count_verified` that copied tokens would have if proposed.

    Args:
        copy: the copied tokens.
        written: tokens that the step wrote, without the end token.
    """
    known = min(len(copy), len(written))
    accepted = next((i for i in range(known) if copy[i] != written[i]), known)
    return accepted + (accepted < known), accepted
