"""Adds up the statistics of results, and summarizes them in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_t5.engine.document_batch import DocumentStats
from mlx_t5.errors import readable


@dataclass
class Totals:
    """The sums of results' statistics; the memory used does not grow with the number of results."""

    results: int = 0
    stats: DocumentStats = field(default_factory=DocumentStats)  # scores and vectors add 0

    def add(self, outcome: Any) -> None:
        self.results += 1
        if stats := getattr(outcome, "stats", None):
            self.stats.add(stats)

    def summary(
        self, seconds: float, unit: str = "prompts", texts: bool = True, verbose: bool = False
    ) -> str:
        """Summarizes the results in one line.

        Args:
            seconds: the time that all results took, without waiting for a pipe or a terminal.
            unit: plural name of the results.
            texts: whether the results are texts, not scores or vectors.
            verbose: whether to add the number of steps that proposed 0, 1, … tokens.
        """
        parts = self._of_texts(seconds, unit) if texts else self._of_prompts(seconds)
        if verbose and self.stats.drafted:
            steps = " ".join(map(str, self.stats.speculation.steps_by_length))
            parts.append(f"steps that proposed 0, 1, … tokens: {steps}")
        if self.stats.peak_memory_bytes:
            parts.append(f"peak memory {readable(self.stats.peak_memory_bytes)}")
        return " · ".join(parts)

    def _of_prompts(self, seconds: float) -> list[str]:
        count, rate = self.results, self.results / max(seconds, 1e-9)
        return [f"{count} prompt{'s' * (count != 1)} in {seconds:.2f} s", f"{rate:.1f} prompts/s"]

    def _of_texts(self, seconds: float, unit: str) -> list[str]:
        stats = self.stats
        parts = [f"{self.results} {unit}"] if self.results > 1 else []
        if stats.pieces:
            counts = (("cut", stats.cut), ("failed", stats.failed), ("kept", stats.kept))
            named = ", ".join(f"{count} {name}" for name, count in counts if count)
            pieces = f"{stats.pieces} piece{'s' * (stats.pieces != 1)}"
            parts.append(pieces + (f" ({named})" if named else ""))
        rate = stats.generated_tokens / max(seconds, 1e-9)
        parts += [f"{stats.generated_tokens} tokens in {seconds:.2f} s", f"{rate:.1f} tokens/s"]
        if stats.drafted:
            accepted = f"{stats.accepted} of {stats.drafted} drafted"
            parts.append(f"acceptance {stats.acceptance_rate:.0%} ({accepted})")
        if stats.speculation.copied_accepted:
            parts.append(f"accepted copies: {stats.speculation.copied_accepted}")
        if stats.target_calls:
            parts.append(f"{stats.tokens_per_call:.2f} tokens per target call")
        return parts
