"""The statistics of many results, added up and on one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizes import readable

if TYPE_CHECKING:
    from results import Stats


@dataclass
class Totals:
    """Sums over results, so that their number costs no memory."""

    results: int = 0
    tokens: int = 0
    target_calls: int = 0
    decided: float = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    peak_memory_bytes: int = 0

    def add(self, stats: Stats) -> None:
        """Counts a result in."""
        self.results += 1
        self.tokens += stats.generated_tokens
        self.target_calls += stats.target_calls
        self.decided += stats.tokens_per_call * stats.target_calls
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.copied += stats.speculation.copied_accepted
        self.peak_memory_bytes = max(self.peak_memory_bytes, stats.peak_memory_bytes)

    def summary(self, seconds: float, unit: str = "prompts") -> str:
        """One line.

        Args:
            seconds: how long the results took together.
            unit: what to call several of them.
        """
        rate = self.tokens / max(seconds, 1e-9)
        parts = [f"{self.results} {unit}"] if self.results > 1 else []
        parts += [f"{self.tokens} tokens in {seconds:.2f} s", f"{rate:.1f} tokens/s"]
        if self.drafted:
            kept = f"{self.accepted} of {self.drafted} drafted"
            parts.append(f"acceptance {self.accepted / self.drafted:.0%} ({kept})")
        if self.copied:
            parts.append(f"{self.copied} copied")
        if self.target_calls:
            parts.append(f"{self.decided / self.target_calls:.2f} tokens per target call")
        if self.peak_memory_bytes:
            parts.append(f"peak memory {readable(self.peak_memory_bytes)}")
        return " · ".join(parts)
