"""What was seen of proposals, and what to believe of the next ones.

Of alpha, the probability that a proposal is accepted, there is a beta distribution with parameters
a and b: accepted and rejected proposals, those of the prior included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from mlx_t5.drafting.proposals import Kind

MEMORY = 80.0  # verified proposals after which an old one counts 1/e
OTHERS = 20.0  # proposals of other rows that count for a row at most
TRIAL_SHARE = 0.02  # of the time, spent on drafts that are not expected to pay
LEAST_PRICE = 0.06  # of a trial, in steps


@dataclass
class Outcomes:
    """What became of proposals, the latest counting most."""

    accepted: float = 0.0
    rejected: float = 0.0

    def add(self, verified: int, accepted: int) -> None:
        """Takes the outcome of a step into account."""
        fade = (1 - 1 / MEMORY) ** verified
        self.accepted = self.accepted * fade + accepted
        self.rejected = self.rejected * fade + verified - accepted


@dataclass
class Experience:
    """What was seen of proposals, by one row or by several.

    Attributes:
        outcomes: by kind.
        credit: seconds that may be spent on trying a draft.
        income: seconds that a step adds to them.
        wait: steps for which nothing has to be decided.
    """

    outcomes: dict[Kind, Outcomes] = field(default_factory=lambda: defaultdict(Outcomes))
    credit: float = 0.0
    income: float = 0.0
    wait: int = 0

    @property
    def verified(self) -> float:
        """Proposals seen, the latest counting most."""
        return sum(kind.accepted + kind.rejected for kind in self.outcomes.values())

    def belief(self, kind: Kind, others: Experience) -> tuple[float, float]:
        """a and b of the beta distribution of alpha for a row with this experience."""
        own, shared = self.outcomes[kind], others.outcomes[kind]
        a = kind.accepted + max(shared.accepted - own.accepted, 0.0)
        b = kind.rejected + max(shared.rejected - own.rejected, 0.0)
        scale = min(1.0, OTHERS / (a + b))
        return a * scale + own.accepted, b * scale + own.rejected

    def affords(self, price: float, step: float) -> bool:
        """Whether a trial that loses so many seconds is due; a usual step takes `step`."""
        price, self.income = max(price, LEAST_PRICE * step), TRIAL_SHARE * step
        due = self.credit >= price
        self.credit += -price if due else self.income
        self.wait = 0 if due else math.ceil((price - self.credit) / self.income)
        return due

    def rest(self) -> None:
        """Takes a step into account for which nothing had to be decided."""
        self.credit += self.income
        self.wait -= 1
