"""Decoding without models: proposals are right by a pattern, and passes cost by a table."""

import numpy as np

from draft_length import Costs, Curve
from pacer import Pace, Pacer

STAIRCASE = Curve(tuple((n, 1 + 0.4 * ((n - 1) // 5) + 0.01 * n) for n in range(1, 129)))
SLOPE = Curve(tuple((n, 0.8 + 0.2 * n) for n in (1, 2, 4, 8, 16, 32, 64, 128)))
LINEAR = Curve(((1, 1.0), (128, 128.0)))
SMALL = Curve(((1, 0.05), (128, 0.4)))
COSTS = {
    "a GPU": Costs(STAIRCASE, SMALL),
    "a CPU": Costs(SLOPE, Curve(((1, 0.1), (128, 1.2)))),
    "a CPU that pays for every position": Costs(LINEAR, Curve(((1, 0.1), (128, 12.8)))),
    "copying on a GPU": Costs(STAIRCASE),
    "copying on a CPU": Costs(SLOPE),
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


class Simulation:
    """One row at a time; `history` passes from one to the next as in a decoder."""

    def __init__(self, costs: Costs, sampled: bool = False, width: int = 1):
        self.costs, self.table, self.sampled = costs, costs.of(1), sampled
        self.pacer = Pacer(costs, width)
        self.kind = "draft" if costs.draft else "copy"

    def step(self, right, place: int, length: int, behind: int) -> tuple[int, int, float]:
        """What a step judges and keeps, and its cost; the draft reads what it missed."""
        length = min(length, len(right) - place - 1)
        run = right[place : place + length]
        kept = length if run.all() else int(np.argmin(run))
        cost = self.table.verify[length]
        if length and self.costs.draft:
            cost += self.table.catch_up(behind) + (length - 1) * self.table.draft
        return length, kept, cost

    def fixed(self, right, gamma: int) -> float:
        """Cost of decoding with the same number of proposals in every step."""
        place = total = 0
        while place < len(right):
            _, kept, cost = self.step(right, place, gamma, 1)
            place, total = place + kept + 1, total + cost
        return total

    def auto(self, right) -> tuple[float, Pace, list[int]]:
        """Cost of letting the pacer choose, what it learned, and the lengths it chose."""
        place, total, pace, lengths = 0, 0.0, Pace(), []
        while place < len(right):
            room = len(right) - place - 1
            (wanted,) = self.pacer.lengths([pace], [self.kind], [room], [self.sampled])
            length, kept, cost = self.step(right, place, wanted, pace.behind)
            self.pacer.observe([pace], [length], [self.kind if length else ""], [(length, kept)])
            place, total = place + kept + 1, total + cost
            lengths.append(length)
        return total, pace, lengths
