"""How many tokens each row is proposed in a step.

A step with gamma proposals takes some seconds and yields 1 + alpha + … + alpha^gamma tokens, if
each proposal is accepted with probability alpha. `Adaptive` takes the numbers with the most tokens
a second, down to none. What a step costs, it learns from the steps (costs.py); alpha, from what was
accepted: of a kind of proposals, and of a row. Rows of a batch share the step, so its cost is that
of the whole batch.

Of alpha there is a beta distribution, not a number, because few proposals say little:
E[alpha^i] = product over j < i of (a + j) / (a + b + j), with a accepted and b rejected ones.

With delta = 0 a text is the same whatever is proposed, but for rounding. Greedy rows, where that
hardly matters, learn from each other and from the clock. Sampled rows learn from those that are or
were in the same batch, and keep to the table of costs, so that a call writes the same on every run.
With delta > 0 the draft has a say in the text, so a row's numbers follow from its own acceptances
and the table alone.

Symbols: B rows, gamma proposals, N the numbers that are considered.
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

NUMBERS = (*range(9), 10, 12, MOST)  # of proposals that are considered
FIRST = 7  # proposals at most, until more than so many were accepted
KEPT = 3  # steps for which a number is kept, as deciding takes time
LEAST_GAIN = 1.02  # estimates are not exact enough to act on less
FIRST_GAIN = 1.1  # nor is the prior, so the first steps are cheap ones
EVIDENCE = 6.0  # verified proposals from which on a number is kept


class Plan(NamedTuple):
    """How many tokens of a draft these rows get while `experience.wait` lasts."""

    rows: Sequence[Row]
    number: int
    experience: Experience


class Adaptive:
    """Chooses how many tokens of what each row is proposed."""

    def __init__(self, expected: Expected, most: int | None = None) -> None:
        """Starts with what is expected of the device; `most` proposals a row, or what suits it."""
        self.expected, self.costs = expected, StepCosts(expected.seconds)
        self.table = StepCosts(partial(expected.seconds, sampled=True))  # learns nothing
        self.most = most_proposals() if most is None else most
        self.experience, self.of_batch = Experience(), Experience()
        self._caught_up = False  # in this step the draft is fed what it has missed
        self._plan = Plan([], 0, self.experience)

    @classmethod
    def of(cls, target: T5, drafter: Drafter | None) -> Adaptive:
        """For a target, which exact decoding may pad, and what drafts for it."""
        most = LONGEST_AUTO if isinstance(target, ExactTarget) else None
        return cls(Expected(target, drafter.model if drafter else None), most)

    def fresh(self) -> Adaptive:
        """For a new batch; what greedy rows have learned is shared."""
        other = copy(self)
        other.of_batch = Experience()
        other._plan = Plan([], 0, other.of_batch)
        return other

    def choose(self, rows: Sequence[Row], offers: Sequence[Sequence[Offer]]) -> list[Choice]:
        """How many tokens of which offer each row is proposed in the next step."""
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
        """Whether these rows, if they stay as they are, get nothing of a draft in the next step."""
        plan = self._plan
        return rows is plan.rows and not plan.number and plan.experience.wait > 0

    def _choose(
        self,
        indices: Sequence[int],
        rows: Sequence[Row],
        offers: Sequence[Sequence[Offer]],
        choices: list[Choice],
    ) -> None:
        """Writes the choices of rows that are greedy or sampled, or of one that is lenient."""
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
        """Indices of the numbers of drafts and of copies with the most tokens a second.

        Now and then it is others: a draft that did not pay may do so by now, and a number that
        seems to be nearly as good may take less than the table says.

        Args:
            options: of the rows.
            costs: of steps.
            shapes: of those that can be made.
            experience: whose credit pays for trials.
        """
        proven = experience.verified >= EVIDENCE
        experience.wait = KEPT if proven and len(options.tokens[0]) > 1 else 0
        experience.income = 0.0
        tokens, seconds = options.tokens.sum(axis=0), costs.seconds(shapes)
        speeds = tokens / seconds
        near = speeds >= speeds.max() / (LEAST_GAIN if proven else FIRST_GAIN)
        d, m = divmod(int(np.where(near, seconds, np.inf).argmin()), speeds.shape[1])
        prices = seconds - tokens / speeds[d, m]  # seconds lost by other numbers
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
        """Learns what became of a row's offers.

        Args:
            row: after the step.
            offers: what it could have been proposed.
            choice: what it was proposed.
            written: tokens that the step wrote.
            accepted: how many of them were proposals.
        """
        if row.settings.num_draft != AUTO:
            return
        text = written[: len(written) - row.ended]
        for kind, tokens, _ in offers:
            if tokens is not None:  # whether it was proposed or not
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
        """The experience that decides for a row: of all greedy rows, of its batch, or its own."""
        if row.adapts:
            return self.experience
        return row.experience if row.settings.delta else self.of_batch

    def shape(self, rows: Sequence[Row], choices: Sequence[Choice]) -> Shape | None:
        """Of a step, if it tells what such steps cost: all rows are greedy and adapt."""
        if self._caught_up or not all(row.adapts for row in rows):
            return None
        positions = 1 + max(choice.length for choice in choices)
        return len(rows), positions, max(choice.drafted for choice in choices)

    def timed(self, shape: Shape | None, seconds: float) -> None:
        """Learns what a step took, by what `shape` says of it."""
        if shape:
            self.costs.note(*shape, seconds)


@dataclass(frozen=True)
class Options:
    """What some rows of a batch can be proposed, and what to expect of it.

    Attributes:
        indices: of the rows in their batch.
        offers: a draft's and another one of each row, where it has them.
        rooms: tokens that each can be proposed at most.
        tokens: (B, N, N) that a step yields each, by the number of drafts and of copies; an axis
            without offers has one number, 0.
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
        """Of these rows, with what was seen of all `others`, and `most` proposals."""
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
        """Tokens that the draft has yet to read, of the row that has most of them."""
        return max((drafted.unread for drafted, _ in self.offers if drafted), default=0)

    def shapes(self, rows: int, others: Sequence[Choice] = ()) -> Grid:
        """Of steps of so many rows, of which others have these choices."""
        drafts, copies = (NUMBERS[:n] for n in self.tokens.shape[1:])
        longest = max((choice.length for choice in others), default=0)
        return grid(rows, drafts, copies, longest, max((c.drafted for c in others), default=0))

    def take(self, decided: tuple[int, int], choices: list[Choice]) -> None:
        """Writes the rows' choices, by the indices of their numbers."""
        d, m = decided
        rows = zip(self.indices, self.offers, self.rooms, self.tokens, strict=True)
        for i, (draft, copied), room, tokens in rows:
            prefer = copied if tokens[0, m] >= tokens[d, 0] else draft
            number = NUMBERS[m if prefer is copied else d]
            if prefer and number:
                choices[i] = prefer.first(min(number, room))


def known(offers: Sequence[Sequence[Offer]]) -> bool:
    """Whether the host knows tokens of some offer."""
    return any(offer.tokens for offered in offers for offer in offered)


def expected_tokens(belief: tuple[float, float], cap: int, numbers: Sequence[int]) -> list[float]:
    """(N,) tokens that a step yields with so many proposals.

    Args:
        belief: a and b of the beta distribution of alpha.
        cap: proposals that the row can have at most.
        numbers: (N,) ascending.
    """
    a, b = belief
    tokens, chance = [1.0], 1.0
    for i in range(min(cap, numbers[-1])):
        chance *= (a + i) / (a + b + i)
        tokens.append(tokens[-1] + chance)
    return [tokens[min(n, len(tokens) - 1)] for n in numbers]


def count_verified(proposed: int, accepted: int, written: int, ended: bool) -> tuple[int, int]:
    """What a step tells about alpha.

    What counts is whether a proposal made the step longer. A proposal behind the end of the text is
    as good as rejected. The end token itself would have come without it, so it does not count.

    Args:
        proposed: how many tokens.
        accepted: how many of them are part of the text.
        written: tokens that the step wrote, the target's own included.
        ended: whether they ended the text.

    Returns:
        How many proposals were verified, and how many of them made the step longer.
    """
    useful = min(accepted, written - 1)
    if ended and proposed == accepted == written:
        return useful, useful
    return useful + (proposed > useful), useful


def compare(copy: Sequence[int], written: Sequence[int]) -> tuple[int, int]:
    """What `count_verified` says of tokens known on the host, whether they were proposed or not.

    Args:
        copy: the tokens.
        written: what the step wrote, without the end token.
    """
    known = min(len(copy), len(written))
    accepted = next((i for i in range(known) if copy[i] != written[i]), known)
    return accepted + (accepted < known), accepted
