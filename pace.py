"""What is remembered about proposals: of one row, of its last step, and of the rows before it.

What is made of it: pacer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_length import Estimate
from drafters import Offer

TASKS = 64  # whose past is remembered
TRIAL_SHARE = 0.03  # of the time, spent on trials at most


@dataclass
class Past:
    """What greedy rows of one task have taught.

    Attributes:
        estimates: of alpha, by kind of proposal.
        pause: `Pace.pause` of the row that looked last.
    """

    estimates: dict[str, Estimate] = field(default_factory=dict)
    pause: int | None = None


class History:
    """What greedy rows have taught, by task; the latest tasks only."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[int, ...], Past] = {}
        self.purse = Purse()

    def of(self, task: tuple[int, ...]) -> Past:
        """What is known of a task; what is added to it stays."""
        known = self._tasks[task] = self._tasks.pop(task, None) or Past()
        if len(self._tasks) > TASKS:
            del self._tasks[next(iter(self._tasks))]
        return known


@dataclass
class Purse:
    """What rows that choose together remember: their last choice, and time put aside for trials.

    Attributes:
        last: how many to draft and to copy was chosen last.
        hold: steps to come for which that is not thought over, if there is nothing to copy.
        savings: seconds.
        price: of the last trial that was thought of.
        worth: seconds that each token kept in the trial now running saves; 0 if none is running.
    """

    last: tuple[int, int] = (0, 0)
    hold: int = 0
    savings: float = 0.0
    price: float = 0.0
    worth: float = 0.0

    def pays(self, price: float, worth: float, step: float) -> bool:
        """Puts a share of a step aside; pays for a trial if that is enough, and says so."""
        self.savings += TRIAL_SHARE * step
        paid = self.savings >= price
        if paid:
            self.savings -= price
        self.price, self.worth = price, worth if paid else 0.0
        return paid

    def earn(self, saved: float) -> None:
        """Takes back seconds that a trial has saved, enough for the next one at most."""
        self.savings = min(self.savings + saved, max(self.savings, self.price))


@dataclass(frozen=True)
class Lesson:
    """What became of a step for one row, before anything is made of it.

    Attributes:
        rows: how many took part in the step.
        drafted: proposals of a model that the step had room for.
        longest: proposals of any kind that it had room for.
        offers: to the row.
        chosen: what it took up.
        worth: seconds that each of it that was kept has saved, if it was a trial; else 0.
        tokens: what it got.
        accepted: how many of them were proposals.
        ended: whether its text ended.
    """

    rows: int
    drafted: int
    longest: int
    offers: Sequence[Offer]
    chosen: Offer
    worth: float
    tokens: Sequence[int]
    accepted: int
    ended: bool


@dataclass
class Pace:
    """What one row has learned and where its time went.

    Attributes:
        task: its task prefix.
        sampled: whether its output depends on how many proposals it gets.
        estimates: of alpha, by kind of proposal.
        purse: its own, if it is sampled.
        lesson: of its last step, not learned yet.
        pause: steps without looking where to copy from, after looking in vain, at most; None if
            that was not in vain, and before the first time.
        rest: how many of them are left, and the one that looks again.
        off: why it gets no proposals, None if it does.
        steps: steps whose costs are known. What follows are sums over them:
        regular: seconds that one regular step of the batch takes.
        promised: seconds in which regular decoding writes the tokens that were expected.
        spent: seconds that the steps were expected to take.
        c, verify: costs of a draft pass and of verifying, relative to a regular step.
    """

    task: tuple[int, ...] = ()
    sampled: bool = False
    estimates: dict[str, Estimate] = field(default_factory=dict)
    purse: Purse = field(default_factory=Purse)
    lesson: Lesson | None = None
    pause: int | None = None
    rest: int = 0
    off: str | None = None
    steps: int = 0
    regular: float = 0.0
    promised: float = 0.0
    spent: float = 0.0
    c: float = 0.0
    verify: float = 0.0
