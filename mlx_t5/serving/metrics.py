"""What the server counts, for Prometheus (https://prometheus.io/docs/practices/naming/).

Every server has a registry of its own, so that several can live in one process. Rates come from
the counters, `rate(t5_generated_tokens_total[1m])`; for a look without Prometheus, tokens/s of the
last seconds and the acceptance rate so far are there as gauges too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mlx_t5.engine.rows import Row, Stats

WINDOW_SECONDS = 10.0  # seconds over which tokens/s is taken
BUCKET_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server. Methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Starts at zero; `clock` gives seconds."""
        self.registry, self._clock = CollectorRegistry(), clock
        self._written: deque[tuple[float, int]] = deque()
        self._request_metrics()
        self._decoding_metrics()

    def _request_metrics(self) -> None:
        counter, seconds = self._counter, self._seconds
        self.requests = counter("t5_requests", "HTTP requests", "path", "status")
        self.request_seconds = seconds(
            "t5_request_seconds",
            "From the first byte of a request to the last of its response",
            "path",
        )
        self.queue_seconds = seconds("t5_queue_seconds", "A row's wait for a place")
        self.first_token_seconds = seconds("t5_first_token_seconds", "From request to first token")
        self._cancelled = counter("t5_cancelled_rows", "Rows whose client went away")
        self._finished = counter("t5_finished_rows", "Rows decoded", "reason")
        self._scored = counter(
            "t5_one_pass_items",
            "Prompts embedded, targets scored, answers scored to rank documents",
            "kind",
        )

    def _decoding_metrics(self) -> None:
        counter = self._counter
        self._prompt_tokens = counter("t5_prompt_tokens", "Source tokens read")
        self._tokens = counter("t5_generated_tokens", "Tokens decided, end tokens included")
        self._calls = counter("t5_target_calls", "Passes of the target, summed over rows")
        self._drafted = counter("t5_drafted_tokens", "Proposals verified")
        self._accepted = counter("t5_accepted_tokens", "Proposals kept")
        self._step_seconds = self._seconds("t5_step_seconds", "A step of the whole batch")
        self._occupancy = Histogram(
            "t5_batch_occupancy",
            "Rows in a step",
            buckets=[2**i for i in range(9)],
            registry=self.registry,
        )
        window = f"Over the last {WINDOW_SECONDS:.0f} s"
        self.observe("t5_tokens_per_second", window, self.tokens_per_second)
        self.observe("t5_acceptance_rate", "Proposals kept / verified", self.acceptance_rate)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _seconds(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(name, help, labels, buckets=BUCKET_SECONDS, registry=self.registry)

    def observe(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Adds a gauge that is read when metrics are asked for."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def stepped(self, rows: int, seconds: float) -> None:
        """Counts a step of the engine with so many rows."""
        self._occupancy.observe(rows)
        self._step_seconds.observe(seconds)

    def wrote(self, tokens: int, calls: int, drafted: int, accepted: int) -> None:
        """Counts what a step decided, over all its rows."""
        self._tokens.inc(tokens)
        self._calls.inc(calls)
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        now = self._clock()
        self._written.append((now, tokens))
        while self._written and self._written[0][0] < now - WINDOW_SECONDS:
            self._written.popleft()

    def finished(self, stats: Stats, reason: str) -> None:
        """Counts a finished row."""
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._finished.labels(reason).inc()

    def scored(self, kind: str, items: int, prompt_tokens: int) -> None:
        """Counts a finished request that took no decoding: "embed", "score" or "rerank"."""
        self._prompt_tokens.inc(prompt_tokens)
        self._scored.labels(kind).inc(items)

    def cancelled(self, rows: int) -> None:
        """Counts rows whose clients withdrew them."""
        self._cancelled.inc(rows)

    def tokens_per_second(self) -> float:
        """Tokens a second, over the last `WINDOW_SECONDS`."""
        since = self._clock() - WINDOW_SECONDS
        return sum(tokens for when, tokens in list(self._written) if when >= since) / WINDOW_SECONDS

    def acceptance_rate(self) -> float:
        """The share of all proposals so far that was accepted; 0 before the first."""
        drafted = _value(self._drafted)
        return _value(self._accepted) / drafted if drafted else 0.0

    def text(self) -> bytes:
        """Returns everything in Prometheus' text format."""
        return generate_latest(self.registry)


def counts(rows: Sequence[Row]) -> tuple[int, int, int, int]:
    """What these rows have so far: tokens decided, target calls, proposals and accepted ones.

    Beams decide a token a call; the best of them may become shorter.
    """
    stats = [row.stats for row in rows]
    return (
        sum(r.stats.target_calls if r.settings.num_beams > 1 else r.decided for r in rows),
        sum(s.target_calls for s in stats),
        sum(s.drafted for s in stats),
        sum(s.accepted for s in stats),
    )


def _value(counter: Counter) -> float:
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return next(sample.value for sample in samples if sample.name.endswith("_total"))
