"""The server's metrics for Prometheus (https://prometheus.io/docs/practices/naming/).

Every server has its own registry, so that several servers can live in one process. Rates are
computed from the counters: `rate(t5_generated_tokens_total[1m])` is the number of tokens a second,
and accepted tokens divided by drafted tokens is the acceptance rate.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mlx_t5.drafting.costs import MOST
from mlx_t5.engine.rows import Row, Stats

BUCKET_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        seconds = partial(histogram, buckets=BUCKET_SECONDS)
        self.requests = counter("t5_requests", "HTTP requests", ("path", "status"))
        help = "From the first byte of a request to the last of its response"
        self.request_seconds = seconds("t5_request_seconds", help, ("path",))
        self.queue_seconds = seconds("t5_queue_seconds", "A row's wait for a place")
        self.first_token_seconds = seconds("t5_first_token_seconds", "From request to first token")
        self.cancelled_rows = counter("t5_cancelled_rows", "Rows whose client went away")
        self._finished = counter("t5_finished_rows", "Rows decoded", ("reason",))
        self._reused = counter("t5_reused_rows", "Rows with the answer of an equal row")
        help = "Prompts embedded, targets scored, answers scored to rank documents"
        self._scored = counter("t5_one_pass_items", help, ("kind",))
        self._prompt_tokens = counter("t5_prompt_tokens", "Source tokens read")
        self._totals = {  # of all rows, by their names in `row_counts`
            "decided": counter("t5_generated_tokens", "Tokens decided, end tokens included"),
            "target_calls": counter("t5_target_calls", "Passes of the target, summed over rows"),
            "drafted": counter("t5_drafted_tokens", "Proposals verified"),
            "accepted": counter("t5_accepted_tokens", "Proposals kept"),
        }
        self._step_seconds = seconds("t5_step_seconds", "A step of the whole batch")
        help = "Proposals of the row that has most in a step; 0: nothing was proposed"
        self._proposals = histogram("t5_step_proposals", help, buckets=range(MOST + 1))
        sizes = [2**i for i in range(9)]
        self._occupancy = histogram("t5_batch_occupancy", "Rows in a step", buckets=sizes)

    def observe(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Adds a gauge; `read` is called for its value whenever the metrics are requested."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def stepped(self, rows: int, proposals: int, seconds: float, added: Mapping[str, int]) -> None:
        """Counts a step.

        Args:
            rows: the number of rows that it advanced.
            proposals: the largest number of proposals of a row.
            seconds: its duration.
            added: what it added to `row_counts`.
        """
        self._occupancy.observe(rows)
        self._proposals.observe(proposals)
        self._step_seconds.observe(seconds)
        for name, count in added.items():
            self._totals[name].inc(count)

    def finished(self, stats: Stats, reason: str) -> None:
        if stats.reused:
            self._reused.inc()
            return
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._finished.labels(reason).inc()

    def scored(self, kind: str, items: int, prompt_tokens: int) -> None:
        """Counts a finished job of `items` scores or vectors; kind: "embed", "score", "rerank"."""
        self._prompt_tokens.inc(prompt_tokens)
        self._scored.labels(kind).inc(items)


def row_counts(rows: Sequence[Row]) -> Counts[str]:
    """Sums over rows.

    A row with beams counts one token per target call, and not the best beam's tokens: a shorter
    beam may become the best, but a counter must not fall.
    """
    counts = Counts[str]()
    for row in rows:
        stats = row.stats
        searches = row.settings.num_beams > 1
        counts["decided"] += stats.target_calls if searches else row.decided - row.held
        counts["target_calls"] += stats.target_calls
        counts["drafted"] += stats.drafted
        counts["accepted"] += stats.accepted
    return counts
