"""Decoding without models: proposals are right by a pattern, and steps cost by a table."""

import numpy as np

from mlx_t5.drafting.adaptive import Adaptive, compare, count_verified
from mlx_t5.drafting.costs import LONGEST, Costs

RIGHT, WRONG = 1, 2
POSITIONS = range(1, 17)


def staircase(n: int) -> float:
    return 1 + 0.4 * ((n - 1) // 5) + 0.01 * n


def slope(n: int) -> float:
    return 0.8 + 0.2 * n


def costs(draft: float, verify) -> Costs:
    """Of a pair whose draft takes this long and whose target takes `verify(positions)`."""
    return Costs({n: float(verify(n)) for n in POSITIONS}, {1: draft})


COSTS = {
    "a GPU": costs(0.05, staircase),
    "a CPU": costs(0.1, slope),
    "a CPU that pays for every position": costs(0.1, float),
}


def patterns(tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """For each place of an output, whether its proposal would be right."""
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


def right_in_a_row(right: np.ndarray) -> list[int]:
    """For each place, how many proposals would be right from there on."""
    runs = [0]
    for each in right[::-1]:
        runs.append(runs[-1] + 1 if each else 0)
    return runs[:0:-1]


class Simulation:
    """One greedy row after the other, which learn from each other as in a decoder.

    Args:
        costs: of steps.
        draft: for each place, whether the draft would be right; None without a draft model.
        copy: the same of what can be copied.
        text: tokens of a text, after which the next begins; None for one text.
        longest: proposals at most.
    """

    def __init__(self, costs: Costs, draft=None, copy=None, text=None, longest=LONGEST):
        self.costs, self.right = costs, {"copy": copy, "draft": draft}
        self.right = {kind: each for kind, each in self.right.items() if each is not None}
        self.adaptive = Adaptive(lambda: costs, list(self.right), longest)
        self.tokens = len(next(iter(self.right.values())))
        self.text = text or self.tokens
        self.runs = {kind: right_in_a_row(right) for kind, right in self.right.items()}

    def room(self, place: int) -> int:
        """Tokens of a text after the one at this place."""
        return self.text - place % self.text - 1

    def step(self, place: int, kind: str | None, length: int) -> tuple[int, float]:
        """How many of the proposals are kept, and what the step costs."""
        kept = min(length, self.runs[kind][place]) if length else 0
        drafting = length * self.costs.draft_pass(1) if kind == "draft" else 0.0
        return kept, drafting + self.costs.verify(1, length + 1)

    def fixed(self, gamma: int, kind: str = "draft") -> float:
        """Cost of decoding with the same number of proposals in every step."""
        place = total = 0
        while place < self.tokens:
            kept, cost = self.step(place, kind, min(gamma, self.room(place)))
            place, total = place + kept + 1, total + cost
        return total

    def auto(self, task: tuple[int, ...] = ()) -> tuple[float, list[tuple[str | None, int]]]:
        """Cost of letting `Adaptive` choose, and what it chose."""
        place, total, chosen = 0, 0.0, []
        while place < self.tokens:
            room = min(self.room(place), LONGEST)
            limits = self.adaptive.limits(task, 1)
            kind = next((kind for kind in self.right if limits.get(kind)), None)
            length = min(limits.get(kind, 0), room)
            kept, cost = self.step(place, kind, length)
            ended = kept == self.room(place)
            if kind == "draft":
                self.adaptive.learn(task, kind, *count_verified(length, kept, kept + 1, ended))
            if "copy" in limits and room:
                ahead = np.where(self.right["copy"], RIGHT, WRONG)
                written = [RIGHT if r else 0 for r in self.right["copy"][place : place + kept + 1]]
                self.adaptive.learn(task, "copy", *compare(ahead[place : place + room], written))
            place, total = place + kept + 1, total + cost
            chosen.append((kind, length))
        return total, chosen
