"""How long a step of several ranks should take: the passes' own work, and what the ranks exchange.

A ring of n ranks gathers in n - 1 hops, and a hop takes a latency and the time of its bytes (the
α-β model of Hockney, https://doi.org/10.1016/S0167-8191(06)80021-9). Nothing is computed
meanwhile: each sum is needed for what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What connects two ranks.

    Attributes:
        latency: seconds of a hop that carries nothing.
        bandwidth: bytes a second.
    """

    latency: float
    bandwidth: float

    def gather_seconds(self, ranks: int, size: int) -> float:
        """How long all ranks take to get `size` bytes of each."""
        return (ranks - 1) * (self.latency + size / self.bandwidth)


def fitted(seconds: Mapping[int, float], ranks: int) -> Link:
    """The link for which gathering takes so long, by least squares of relative errors.

    Args:
        seconds: bytes of each rank → how long it took; two sizes at least.
        ranks: how many there were.
    """
    points = [(size, took / (ranks - 1)) for size, took in seconds.items()]
    # took ≈ a + b·size, each divided by took
    weights = [(1 / took, size / took) for size, took in points]
    aa, ab, bb = (sum(u[i] * u[j] for u in weights) for i, j in ((0, 0), (0, 1), (1, 1)))
    a_1, b_1 = (sum(u[i] for u in weights) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency = (a_1 * bb - b_1 * ab) / determinant
    slope = (b_1 * aa - a_1 * ab) / determinant
    return Link(max(latency, 0.0), 1 / max(slope, 1e-15))


def step_seconds(work: float, ranks: int, exchanged: Sequence[int], link: Link) -> float:
    """How long a step over several ranks should take.

    Args:
        work: seconds that a rank's own part of it takes.
        ranks: n.
        exchanged: bytes of a rank in each collective of the step.
        link: what connects them.
    """
    return work + sum(link.gather_seconds(ranks, size) for size in exchanged)
