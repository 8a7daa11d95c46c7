"""Sums over results, and the one line that tells them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_t5.sizes import readable


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
    pieces: int = 0
    cut: int = 0
    failed: int = 0
    peak_memory_bytes: int = 0

    def add(self, outcome: Any) -> None:
        """Counts a result in; scores and vectors have no statistics."""
        self.results += 1
        if (stats := getattr(outcome, "stats", None)) is None:
            return
        self.tokens += stats.generated_tokens
        self.target_calls += stats.target_calls
        self.decided += stats.tokens_per_call * stats.target_calls
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        for name in ("pieces", "cut", "failed"):  # of a document
            setattr(self, name, getattr(self, name) + getattr(stats, name, 0))
        self.copied += stats.speculation.copied_accepted
        self.peak_memory_bytes = max(self.peak_memory_bytes, stats.peak_memory_bytes)

    @classmethod
    def of_all(cls, several: Sequence[dict[str, Any]]) -> Totals:
        """The sums of several, each as `asdict` gives it."""
        totals = cls()
        for name in vars(totals):
            values = [sums[name] for sums in several]
            setattr(totals, name, max(values) if name == "peak_memory_bytes" else sum(values))
        return totals

    def summary(self, seconds: float, unit: str = "prompts", texts: bool = True) -> str:
        """One line.

        Args:
            seconds: how long the results took together.
            unit: what to call several of them.
            texts: whether they are texts, and not scores or vectors.
        """
        parts = self._of_texts(seconds, unit) if texts else self._of_prompts(seconds)
        if self.peak_memory_bytes:
            parts.append(f"peak memory {readable(self.peak_memory_bytes)}")
        return " · ".join(parts)

    def _of_prompts(self, seconds: float) -> list[str]:
        count, rate = self.results, self.results / max(seconds, 1e-9)
        return [f"{count} prompt{'s' * (count != 1)} in {seconds:.2f} s", f"{rate:.1f} prompts/s"]

    def _of_texts(self, seconds: float, unit: str) -> list[str]:
        rate = self.tokens / max(seconds, 1e-9)
        parts = [f"{self.results} {unit}"] if self.results > 1 else []
        if self.pieces:
            counts = (("cut", self.cut), ("failed", self.failed))
            named = ", ".join(f"{count} {name}" for name, count in counts if count)
            parts.append(f"{self.pieces} pieces" + (f" ({named})" if named else ""))
        parts += [f"{self.tokens} tokens in {seconds:.2f} s", f"{rate:.1f} tokens/s"]
        if self.drafted:
            accepted = f"{self.accepted} of {self.drafted} drafted"
            parts.append(f"acceptance {self.accepted / self.drafted:.0%} ({accepted})")
        if self.copied:
            parts.append(f"{self.copied} copied")
        if self.target_calls:
            parts.append(f"{self.decided / self.target_calls:.2f} tokens per target call")
        return parts
