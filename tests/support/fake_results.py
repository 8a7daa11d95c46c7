"""Results and their statistics as the command line takes them, without a model."""

from dataclasses import dataclass, field


@dataclass
class FakeSpeculation:
    copied_accepted: int = 0


@dataclass
class FakeStats:
    prompt_tokens: int = 3
    generated_tokens: int = 10
    target_calls: int = 4
    drafted: int = 12
    accepted: int = 6
    tokens_per_call: float = 2.5
    peak_memory_bytes: int = 2_500_000_000
    speculation: FakeSpeculation = field(default_factory=FakeSpeculation)


@dataclass
class FakeResult:
    text: str
    tokens: list[int] = field(default_factory=lambda: [5, 6])
    writers: list[str] = field(default_factory=lambda: ["draft", "target"])
    finish_reason: str = "stop"
    stats: FakeStats = field(default_factory=FakeStats)
    error: str | None = None
    score: float | None = None
