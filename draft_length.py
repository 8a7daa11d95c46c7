"""How many tokens to propose: what a step is expected to yield against what it costs.

If each proposal is kept with probability alpha, independently, one pass of the target yields

    E(gamma) = (1 - alpha^(gamma+1)) / (1 - alpha)

tokens, and decoding gets faster by S(gamma) = E(gamma) / (gamma c + v(gamma+1) / v(1)): theorem 3.8
of https://arxiv.org/abs/2211.17192, with the cost of verifying measured instead of taken for free.
Estimating alpha while decoding follows the aim of https://arxiv.org/abs/2405.04304 and
https://arxiv.org/abs/2405.19715, without a classifier to train. Everything here is pure.

A pass over B rows of M positions is taken to cost what one row of B M positions does: its matrix
products, which are nearly all of it, have the same shapes. So one curve serves all batch sizes.

Symbols: alpha acceptance probability, gamma proposals, c cost of a draft pass relative to the
target's, v(n) cost of a target pass over n positions, B rows, S speed-up over regular decoding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

AUTO = "auto"  # in place of a number of proposals
LONGEST = 15  # proposals a row at most; beyond that they hardly ever all hold
WORTH = 1.03  # a promised speed-up below this is within the error of what promises it


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a step is expected to yield, the target's own included: E(gamma)."""
    if alpha >= 1:
        return gamma + 1.0
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


@dataclass(frozen=True)
class Curve:
    """What a pass costs by how many positions it computes.

    Attributes:
        points: (positions, seconds), ascending. Between two of them costs are taken to rise
            evenly; beyond the last as they did between the last two.
    """

    points: tuple[tuple[int, float], ...]

    def at(self, positions: int) -> float:
        """Seconds of a pass over so many positions."""
        points = self.points
        after = bisect_left(points, (positions,))
        if after < len(points) and points[after][0] == positions:
            return points[after][1]
        if len(points) == 1 or after == 0:
            return points[0][1]
        after = min(after, len(points) - 1)
        (n0, s0), (n1, s1) = points[after - 1 : after + 1]
        return max(s0 + (s1 - s0) * (positions - n0) / (n1 - n0), s1 if positions > n1 else 0.0)


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step over a given number of rows, in seconds.

    Attributes:
        rows: B.
        draft: one pass of the draft over one position a row; 0 without a draft model.
        verify: the target's pass over 1, 2, … positions a row.
        drafter: the curve of the draft model, None without one.
    """

    rows: int
    draft: float
    verify: tuple[float, ...]
    drafter: Curve | None

    @property
    def longest(self) -> int:
        """The most proposals that can be chosen."""
        return len(self.verify) - 1

    def step(self, drafted: int, free: int = 0) -> float:
        """A step in which rows get up to `drafted` proposals of a model and `free` copied ones."""
        return drafted * self.draft + self.verify[max(drafted, free)]

    def catch_up(self, behind: int) -> float:
        """A draft pass that first has to read `behind` tokens a row, the last one included."""
        return self.drafter.at(self.rows * behind) if self.drafter else 0.0


@dataclass(frozen=True)
class Costs:
    """What passes of a target and of its draft cost on this machine; no draft proposes for free."""

    target: Curve
    draft: Curve | None = None

    def of(self, rows: int, longest: int = LONGEST) -> StepCosts:
        """Costs of steps over so many rows with up to `longest` proposals each."""
        draft = self.draft.at(rows) if self.draft else 0.0
        verify = tuple(self.target.at(rows * (gamma + 1)) for gamma in range(longest + 1))
        return StepCosts(rows, draft, verify, self.draft)


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

    def add(self, drafted: int, kept: int) -> None:
        """Takes a step's outcome into account."""
        judged = min(drafted, kept + 1)
        fade = (1 - 1 / self.memory) ** judged
        self.judged = self.judged * fade + judged
        self.kept = self.kept * fade + kept

    def doubt(self) -> None:
        """Halves the weight of the past: something has happened that it did not promise."""
        self.judged, self.kept = self.judged / 2, self.kept / 2

    def alpha(self, prior: float, weight: float) -> float:
        """The estimate, with a prior that counts as much as `weight` judgements."""
        return (weight * prior + self.kept) / (weight + self.judged)


@dataclass(frozen=True)
class Outlook:
    """What may be expected of a row's next proposals.

    Attributes:
        alpha: probability that each is kept.
        room: how many the row can use before it reaches its end.
        free: whether no model is asked for them.
    """

    alpha: float
    room: int
    free: bool

    def gains(self, longest: int) -> list[float]:
        """Expected tokens of a step with 0, 1, … proposals."""
        return [expected_tokens(self.alpha, min(g, self.room)) for g in range(longest + 1)]


def best_lengths(outlooks: Sequence[Outlook], costs: StepCosts) -> tuple[int, int, float]:
    """The numbers of proposals that make a step over these rows worth most.

    Rows share the step, so they share its length: a row's padding would cost as much as its
    proposals. Copied proposals may be more than drafted ones, as they only need verifying.

    Returns:
        How many to draft, how many to copy, and the expected speed-up; (0, 0, 1.0) if it would not
        reach `WORTH`.
    """
    longest, count = costs.longest, len(outlooks)
    drafted, free = ([o for o in outlooks if o.free == kind] for kind in (False, True))
    by_draft, by_copy = (
        [sum(column) / count for column in zip(*(o.gains(longest) for o in some), strict=True)]
        or [0.0] * (longest + 1)
        for some in (drafted, free)
    )
    best = (0, 0, 1.0)
    for d in range(longest + 1 if drafted else 1):
        # Copying fewer than are drafted would save nothing.
        for k in range(d, longest + 1) if free else (0,):
            s = (by_draft[d] + by_copy[k]) * costs.verify[0] / costs.step(d, k)
            if s >= WORTH and s > best[2] * (1 + 1e-9):
                best = (d, k, s)
    return best


def break_even(costs: StepCosts, free: bool) -> float | None:
    """The least alpha with which some length is worth it, None if even alpha = 1 is not enough."""

    def pays(alpha: float) -> bool:
        return best_lengths([Outlook(alpha, costs.longest, free)], costs)[2] > 1

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
