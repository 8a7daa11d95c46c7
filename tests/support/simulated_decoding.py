"""Simulates decoding: a pattern says which proposals are right, and a table what a step costs."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from mlx_t5.drafting.adaptive import Adaptive, Experience
from mlx_t5.drafting.costs import MOST, StepCosts
from mlx_t5.drafting.draft_model import DRAFT
from mlx_t5.drafting.proposals import Choice, Offer
from mlx_t5.settings import AUTO

RIGHT, WRONG = 1, 2


def staircase(n):
    return 1 + 0.4 * ((n - 1) // 5) + 0.01 * n


class Table(StepCosts):
    """Costs of a draft pass and, by number of positions, of a target pass.

    `wrong`: the factor by which the true costs differ from the expected ones.
    """

    def __init__(self, draft, verify, wrong=lambda positions, passes: 1.0, most=MOST):
        self.draft_pass, self.verify, self.wrong, self.most = draft, verify, wrong, most
        self.errors, self.seen = {}, set()

    def fresh(self):
        return Table(self.draft_pass, self.verify, self.wrong, self.most)

    def expected(self, rows, positions, passes, sampled=False):
        verify = np.vectorize(self.verify, [float])(rows * positions)
        return np.multiply(passes, self.draft_pass) + verify

    def true(self, rows, positions, passes):
        return float(self.expected(rows, positions, passes)) * self.wrong(positions, passes)


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
    experience: Experience = field(default_factory=Experience)
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
    def room(self):
        return self.tokens - self.place - 1

    def offers(self):
        offers = []
        for kind, right in self.right.items():
            ahead = right[self.place : self.place + min(MOST, self.room)]
            known = [RIGHT if r else WRONG for r in ahead]
            if kind.drafted or known:
                offers.append(Offer(kind, None if kind.drafted else known))
        return offers

    def kept(self, kind, length):
        """Returns how many of `length` proposals are accepted."""
        ahead = self.right[kind][self.place : self.place + length]
        return int(np.argmin(np.append(ahead, False)))


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

        def choose(rows, offers):
            lengths = [min(gamma, row.room) for row in rows]
            if kind.drafted:
                return [Choice(n, n) for n in lengths]
            pairs = zip(offers, lengths, strict=True)
            known = [{o.kind: o.tokens for o in row}.get(kind, ())[:n] for row, n in pairs]
            return [Choice(len(tokens), 0, tokens) for tokens in known]

        return self._decode(lines, choose, learn=False)

    def best(self, make, kind=DRAFT):
        """Returns the seconds with the best fixed number; `make()` returns new lines."""
        return min(self.fixed(make(), gamma, kind) for gamma in range(self.most + 1))

    def _decode(self, lines, choose, learn):
        total, running = 0.0, list(lines)
        while running:
            offers = [line.offers() for line in running]
            choices = choose(running, offers)
            positions = 1 + max(choice.length for choice in choices)
            passes = max(choice.passes for choice in choices)
            seconds = self.table.true(len(running), positions, passes)
            total += seconds
            for line, offered, choice in zip(running, offers, choices, strict=True):
                kind = next((k for k in line.right if k.drafted == bool(choice.passes)), DRAFT)
                num_accepted = line.kept(kind, choice.length) if choice.length else 0
                written = [RIGHT] * num_accepted + [0]
                right_after = line.place + num_accepted
                for kind, right in line.right.items():
                    if not kind.drafted and right_after < len(right) and right[right_after]:
                        written[-1] = RIGHT  # what could have been copied
                if learn:
                    self.adaptive.note(line, offered, choice.passes, written, num_accepted)
                line.place += num_accepted + 1
            if learn:
                noise = np.exp(self.rng.normal(0, self.noise)) if self.noise else 1.0
                if self.adaptive.shape:
                    self.adaptive.costs.note(*self.adaptive.shape, seconds * noise)
                self.chosen.append([choice.length for choice in choices])
            running = [line for line in running if line.place < line.tokens]
        return total
