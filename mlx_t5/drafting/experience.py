"""Counts the outcomes of past proposals, and estimates from them how the next ones will fare.

alpha, the probability that a proposal is accepted, has a beta distribution. Its parameters a and b
are the numbers of accepted and rejected proposals, plus a prior's numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from mlx_t5.drafting.proposals import Kind

MEMORY = 80.0  # verified proposals after which an old proposal counts 1/e
OTHERS = 20.0  # maximum weight of the prior and of other rows, in proposals
TRIAL_SHARE = 0.02  # share of the time spent on trials
LEAST_PRICE = 0.06  # minimum price of a trial, as a fraction of a step's seconds


@dataclass
class Outcomes:
    """The numbers of accepted and rejected proposals, in which older proposals count less."""

    accepted: float = 0.0
    rejected: float = 0.0

    def add(self, verified: int, accepted: int) -> None:
        """Adds the outcome of a step."""
        fade = (1 - 1 / MEMORY) ** verified
        self.accepted = self.accepted * fade + accepted
        self.rejected = self.rejected * fade + verified - accepted


@dataclass
class Experience:
    """The outcomes of the proposals of one or several rows, and the time left for trials.

    Attributes:
        outcomes: the outcomes of each kind of proposals.
        credit: seconds that may be lost on trials.
        income: seconds that each step adds to the credit.
        wait: steps until the next choice.
    """

    outcomes: dict[Kind, Outcomes] = field(default_factory=lambda: defaultdict(Outcomes))
    credit: float = 0.0
    income: float = 0.0
    wait: int = 0

    @property
    def verified(self) -> float:
        """The number of verified proposals, in which older proposals count less."""
        return sum(kind.accepted + kind.rejected for kind in self.outcomes.values())

    def belief(self, kind: Kind, others: Experience) -> tuple[float, float]:
        """Returns a and b of alpha's beta distribution, from this experience and other rows'."""
        own, shared = self.outcomes[kind], others.outcomes[kind]
        a = kind.accepted + max(shared.accepted - own.accepted, 0.0)
        b = kind.rejected + max(shared.rejected - own.rejected, 0.0)
        scale = min(1.0, OTHERS / (a + b))
        return a * scale + own.accepted, b * scale + own.rejected

    def affords(self, price: float, step: float) -> bool:
        """Returns whether a trial is due, and updates the credit.

        Args:
            price: seconds that the trial is expected to lose.
            step: seconds of a step without a trial.
        """
        price, self.income = max(price, LEAST_PRICE * step), TRIAL_SHARE * step
        due = self.credit >= price
        self.credit += -price if due else self.income
        self.wait = 0 if due else math.ceil((price - self.credit) / self.income)
        return due

    def rest(self) -> None:
        """Counts a step that repeated the last choice."""
        self.credit += self.income
        self.wait -= 1
