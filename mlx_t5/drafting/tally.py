"""What became of the proposals of some texts, added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_t5.drafting import theory

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Result


@dataclass(frozen=True)
class Tally:
    """Sums over texts that were decoded.

    Attributes:
        target_calls: forward passes of the target.
        decided: tokens, EOS included.
        drafted: proposals.
        accepted: of them.
        drafted_by_position: how many steps had a first, second, … proposal.
        accepted_by_position: how many of those were accepted.
    """

    target_calls: int
    decided: int
    drafted: int
    accepted: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Tally:
        """Adds up the statistics of results."""
        stats = [result.stats for result in results]
        return cls(
            sum(s.target_calls for s in stats),
            sum(round(s.tokens_per_call * s.target_calls) for s in stats),
            sum(s.drafted for s in stats),
            sum(s.accepted for s in stats),
            theory.added([s.speculation.drafted_by_position for s in stats]),
            theory.added([s.speculation.accepted_by_position for s in stats]),
        )

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_call(self) -> float:
        """Tokens decided a forward pass of the target."""
        return self.decided / max(self.target_calls, 1)

    @property
    def alpha(self) -> float:
        """The probability that a proposal is accepted; 0 if none was verified."""
        positions = self.drafted_by_position, self.accepted_by_position
        return theory.acceptance_probability(*positions) or 0.0
