"""Tests that counters of steps never decrease, as Prometheus demands."""

from types import SimpleNamespace

from mlx_t5.engine.rows import Stats
from mlx_t5.serving.metrics import row_counts
from mlx_t5.settings import Settings


def test_a_shorter_best_beam_never_lowers_the_count():
    def row(decided: int, calls: int, num_beams: int) -> SimpleNamespace:
        stats = Stats(target_calls=calls)
        settings = Settings(num_beams=num_beams)
        return SimpleNamespace(decided=decided, settings=settings, stats=stats)

    assert row_counts([row(9, 9, 2), row(9, 3, 1)]) == (18, 12, 0, 0)
    assert row_counts([row(5, 10, 2), row(12, 4, 1)]) == (22, 14, 0, 0)
