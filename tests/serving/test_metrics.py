"""Tests the counters of steps, which never decrease, as Prometheus demands."""

from collections import Counter
from types import SimpleNamespace

from fake_model import FakeModel
from fake_serving import ENDLESS, PATIENCE, V
from mlx_t5.engine.rows import Stats
from mlx_t5.serving.metrics import row_counts
from mlx_t5.settings import Settings


def test_a_shorter_best_beam_never_lowers_the_count():
    def row(decided: int, calls: int, num_beams: int) -> SimpleNamespace:
        stats = Stats(target_calls=calls)
        settings = Settings(num_beams=num_beams)
        return SimpleNamespace(decided=decided, held=0, settings=settings, stats=stats)

    assert row_counts([row(9, 9, 2), row(9, 3, 1)]) == Counter(decided=18, target_calls=12)
    assert row_counts([row(5, 10, 2), row(12, 4, 1)]) == Counter(decided=22, target_calls=14)


def test_texts_that_were_decoded_are_counted_and_reused_ones_are_not(serve):
    served = serve(FakeModel(ENDLESS, V), answers=10)
    results = served.submit([[2], [3], [3], [4]], max_tokens=9, num_draft=2).results()
    results += served.submit([[2]], max_tokens=9, num_draft=2).results()
    decoded = [result.stats for result in results if not result.stats.reused]
    assert served.worker.stop(PATIENCE) and len(decoded) == 3
    value = served.worker._metrics.registry.get_sample_value
    assert value("t5_queue_seconds_count") == 3
    assert value("t5_step_seconds_count") == len(served.model.calls)
    assert value("t5_batch_occupancy_sum") == sum(len(rows) for rows, _ in served.model.calls)
    assert value("t5_generated_tokens_total") == 3 * 9
    for name, count in {"target_calls": "target_calls", "drafted_tokens": "drafted"}.items():
        assert value(f"t5_{name}_total") == sum(getattr(stats, count) for stats in decoded)
