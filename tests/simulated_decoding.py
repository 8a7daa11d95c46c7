"""Decoding without models: proposals are right by a pattern, and steps cost by a table."""

import numpy as np

from draft_length import LONGEST, Costs, StepCosts
from drafters import Offer
from pace import History, Pace
from pacer import Pacer


def costs(draft: float, verify) -> Costs:
    """The same for any number of rows."""
    seconds = tuple(float(verify(n)) for n in range(1, LONGEST + 2))
    return Costs((StepCosts(1, draft, seconds), StepCosts(2, draft, seconds)))


def staircase(n: int) -> float:
    return 1 + 0.4 * ((n - 1) // 5) + 0.01 * n


def slope(n: int) -> float:
    return 0.8 + 0.2 * n


COSTS = {
    "a GPU": costs(0.05, staircase),
    "a CPU": costs(0.1, slope),
    "a CPU that pays for every position": costs(0.1, float),
}
RIGHT, WRONG = 1, 0


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
    """Rows one at a time; what greedy ones teach passes from one to the next as in a decoder.

    Args:
        costs: of steps.
        draft: for each place, whether the draft would be right; None without a draft model.
        copy: the same of what can be copied.
        sampled: whether rows are.
    """

    def __init__(self, costs: Costs, draft=None, copy=None, sampled: bool = False):
        self.table = costs.of(1)
        self.draft, self.copy, self.sampled = draft, copy, sampled
        self.pacer = Pacer(costs, 1, History())
        self.tokens = len(draft if draft is not None else copy)

    def offers(self, place: int) -> list[Offer]:
        """What is offered there; a copied token is 1 where it is right and 0 where it is not."""
        room = min(self.tokens - place - 1, LONGEST)
        offers = []
        if self.copy is not None and room:
            ahead = tuple(int(right) for right in self.copy[place : place + room])
            offers.append(Offer("copy", room, ahead))
        return offers + ([Offer("draft", room)] if self.draft is not None else [])

    def step(self, place: int, offer: Offer) -> tuple[int, float]:
        """How many of what was taken up are kept, and what the step costs."""
        right = self.draft if offer.tokens is None else self.copy
        run = right[place : place + offer.length] if offer.length else np.ones(0, bool)
        kept = offer.length if run.all() else int(np.argmin(run))
        drafted = offer.length if offer.tokens is None else 0
        return kept, self.table.table[drafted, offer.length]

    def fixed(self, gamma: int, kind: str = "draft") -> float:
        """Cost of decoding with the same number of proposals in every step."""
        place = total = 0
        while place < self.tokens:
            offer = next((o for o in self.offers(place) if o.kind == kind), Offer("", 0, ()))
            kept, cost = self.step(place, offer.cut(gamma))
            place, total = place + kept + 1, total + cost
        return total

    def auto(self) -> tuple[float, Pace, list[Offer]]:
        """Cost of letting the pacer choose, what it learned, and what it chose."""
        place, total, pace, chosen = 0, 0.0, Pace((), self.sampled), []
        while place < self.tokens:
            offers = self.offers(place)
            (offer,) = self.pacer.choose([pace], [offers])
            self.pacer.learn([pace])  # from the step before, as the engine does
            kept, cost = self.step(place, offer)
            ahead = self.copy if self.copy is not None else np.ones(self.tokens, bool)
            written = [RIGHT if right else 2 for right in ahead[place : place + kept + 1]]
            ended = place + kept + 1 >= self.tokens
            self.pacer.observe([pace], [offers], [offer], [(written, kept, ended)])
            place, total = place + kept + 1, total + cost
            chosen.append(offer)
        return total, pace, chosen
