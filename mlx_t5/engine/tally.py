"""Sums of the proposals' statistics over several texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_t5.engine.rows import Result


@dataclass(frozen=True)
class Tally:
    """Sums over decoded texts; see `Stats` and `Speculation`."""

    target_calls: int
    decided: int
    drafted: int
    accepted: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Tally:
        stats = [result.stats for result in results]
        return cls(
            sum(s.target_calls for s in stats),
            sum(round(s.tokens_per_call * s.target_calls) for s in stats),
            sum(s.drafted for s in stats),
            sum(s.accepted for s in stats),
            added([s.speculation.drafted_by_position for s in stats]),
            added([s.speculation.accepted_by_position for s in stats]),
        )

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_call(self) -> float:
        return self.decided / max(self.target_calls, 1)

    @property
    def alpha(self) -> float:
        """Estimated probability that a proposal is accepted; 0 if none was verified."""
        positions = self.drafted_by_position, self.accepted_by_position
        return acceptance_probability(*positions) or 0.0


def acceptance_probability(drafted: Sequence[int], accepted: Sequence[int]) -> float | None:
    """The share of verified proposals that were accepted; None if nothing was verified.

    Position i was verified in the steps that accepted position i - 1 and had a proposal at i. The
    counts do not say how many steps did both, so the smaller count is taken.
    """
    before = [*drafted[:1], *accepted]
    verified = sum(map(min, before, drafted))
    return sum(accepted) / verified if verified else None


def added(counts: Sequence[Sequence[int]]) -> list[int]:
    """The sums of lists, position by position; a shorter list counts 0 past its end."""
    longest = max(map(len, counts), default=0)
    return [sum(values[i] for values in counts if i < len(values)) for i in range(longest)]
