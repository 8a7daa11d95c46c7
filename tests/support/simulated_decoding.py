"""Simulates decoding: a pattern says which proposals are right, and a table what a step costs."""

from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import numpy as np

from mlx_t5.drafting.adaptive import AcceptanceStats, Adaptive, Plan
from mlx_t5.drafting.costs import MOST, StepCosts
from mlx_t5.drafting.draft_model import DRAFT
from mlx_t5.drafting.proposals import Copy
from mlx_t5.drafting.source_copy import COPY
from mlx_t5.network.interface import WeightsRead
from mlx_t5.settings import AUTO

RIGHT, WRONG = 1, 2


def staircase(n):
    return 1 + 0.4 * ((n - 1) // 5) + 0.01 * n


class Table(StepCosts):
    """Costs of a draft pass and, by number of positions, of a target pass.

    `wrong`: the factor by which the true costs differ from the expected ones.
    """

    def __init__(self, draft, verify, wrong=lambda positions, passes: 1.0, most=MOST):
        self.draft_pass, self.verify, self.wrong, self.most = draft, cache(verify), wrong, most
        self.errors, self.seen = {}, set()
        self.target = WeightsRead(12, 5 * 10**8, "float32")  # as for a t5-base

    def fresh(self):
        return Table(self.draft_pass, self.verify, self.wrong, self.most)

    def expected(self, rows, positions, passes, sampled=False):
        count = np.asarray(rows * positions)
        verify = np.array([self.verify(n) for n in count.ravel().tolist()]).reshape(count.shape)
        return np.multiply(passes, self.draft_pass) + verify

    def true(self, rows, positions, passes):
        seconds = passes * self.draft_pass + self.verify(rows * positions)
        return seconds * self.wrong(positions, passes)


COSTS = {
    "a GPU": Table(0.05, staircase),
    "a CPU": Table(0.1, lambda n: 0.8 + 0.2 * n),
    "a CPU that pays for every position": Table(0.1, float),
}


def patterns(tokens, seed=0):
    """Returns patterns by name: whether the proposal for each place of an output is right."""
    rng = np.random.default_rng(seed)
    draws, places = rng.random(tokens), np.arange(tokens)
    return {
        "always right": np.ones(tokens, bool),
        "never right": np.zeros(tokens, bool),
        "nine of ten": draws < 0.9,
        "six of ten": draws < 0.6,
        "three of ten": draws < 0.3,
        "one of ten": draws < 0.1,
        "alternating": np.where(places // 300 % 2 == 0, draws < 0.95, draws < 0.05),
    }


@dataclass(eq=False)
class Line:
    """A row of a simulation.

    Attributes:
        right: by kind of proposals, whether the proposal for each place of its text is right.
        sampled: whether the row samples.
        delta: the delta of the acceptance rule.
    """

    right: dict
    sampled: bool = False
    delta: float = 0.0
    place: int = 0
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    finish_reason: None = None
    ended: bool = False

    @property
    def settings(self):
        return SimpleNamespace(num_draft=AUTO, delta=self.delta)

    @property
    def adapts(self):
        return not self.sampled and not self.delta

    @property
    def tokens(self):
        return len(next(iter(self.right.values())))

    @property
    def max_proposals(self):
        return self.tokens - self.place - 1

    @property
    def copied(self):
        """Its kind of copied proposals, or None."""
        return next((kind for kind in self.right if kind is not DRAFT), None)

    def copy(self):
        end = self.place + min(MOST, self.max_proposals)
        ahead = self.right.get(self.copied, [])[self.place : end]
        return Copy(self.copied or COPY, [RIGHT if right else WRONG for right in ahead])

    def kept(self, kind, length):
        """Returns how many of `length` proposals are accepted."""
        ahead = self.right[kind][self.place : self.place + length]
        return [*ahead.tolist(), False].index(False)


class Simulation:
    """Decodes several lines in one batch.

    Attributes:
        chosen: the number of proposals of each line in each step.
    """

    def __init__(self, table, most=MOST, noise=0.0, seed=0):
        self.table, self.most, self.noise = table.fresh(), most, noise
        self.table.most = most
        self.rng = np.random.default_rng(seed)
        self.adaptive = Adaptive(self.table)
        self.chosen = []

    def auto(self, lines):
        """Returns the seconds of decoding all lines if `Adaptive` chooses the numbers."""
        return self._decode(lines, self.adaptive.choose, learn=True)

    def fixed(self, lines, gamma, kind=DRAFT):
        """Returns the seconds with a fixed number of proposals of a kind."""

        def choose(rows, copies, unread, idle):
            lengths = [min(gamma, row.max_proposals) for row in rows]
            if kind is DRAFT:
                return Plan([()] * len(rows), lengths, max(lengths))
            known = [c.tokens[:n] for c, n in zip(copies, lengths, strict=True)]
            return Plan(known, [0] * len(rows), max(map(len, known)))

        return self._decode(lines, choose, learn=False)

    def best(self, make, kind=DRAFT):
        """Returns the seconds with the best fixed number; `make()` returns new lines."""
        return min(self.fixed(make(), gamma, kind) for gamma in range(self.most + 1))

    def _decode(self, lines, choose, learn):
        total, running, idle = 0.0, list(lines), False
        while running:
            copies = [line.copy() for line in running]
            unread = [0] * len(running) if DRAFT in running[0].right else None
            plan = choose(running, copies, unread, idle)
            seconds = self.table.true(len(running), 1 + plan.gamma, max(plan.drafted))
            total += seconds
            of_lines = zip(running, copies, plan.copies, plan.drafted, strict=True)
            for line, copy, copied, drafted in of_lines:
                num_accepted = 0
                if copied or drafted:
                    kind = DRAFT if drafted else line.copied
                    num_accepted = line.kept(kind, drafted or len(copied))
                written = [RIGHT] * num_accepted + [0]
                right_after = line.place + num_accepted
                if line.copied and line.right[line.copied][right_after : right_after + 1].any():
                    written[-1] = RIGHT  # what could have been copied
                if learn:
                    self.adaptive.update(line, copy, drafted, written, num_accepted)
                line.place += num_accepted + 1
            if learn:
                noise = np.exp(self.rng.normal(0, self.noise)) if self.noise else 1.0
                if plan.usual:
                    shape = len(running), plan.gamma, max(plan.drafted)
                    self.adaptive.costs.update(*shape, seconds * noise)
                lengths = zip(plan.copies, plan.drafted, strict=True)
                self.chosen.append([len(copied) or drafted for copied, drafted in lengths])
            before, running = running, [line for line in running if line.place < line.tokens]
            idle = plan.idle and running == before
        return total
