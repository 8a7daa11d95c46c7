"""Documents in the thread that owns MLX: many texts, of which few are in the queue at a time."""

import pytest

from fake_serving import ENDLESS, Gated, V, until
from mlx_t5.serving.errors import ApiError


def test_another_request_takes_the_next_place_and_the_queue_has_room(serve):
    served = serve(max_batch=2, max_queue=2)
    long = served.submit_held([[2, 3]] * 40, size=2, max_tokens=5, document=True)
    order = []
    other = served.submit([[4]], put=lambda event: order.append("other"), max_tokens=5)
    with pytest.raises(ApiError, match="queue is full"):
        served.submit([[5], [6]])
    served.release()
    pieces = 0
    while "other" not in order:
        pieces += 1
        long.next()
    assert pieces <= 5, "two were there before it, and one beside it"
    assert other.job.unfinished == 0 < long.job.unfinished


@pytest.mark.parametrize("stage", ["step", "insert", "logits"])
def test_a_piece_that_fails_is_marked_and_the_others_go_on(serve, unpadded, stage):
    class Breaking(Gated):
        def encode(self, ids, mask=None):
            if ids.shape[1] > 9 and stage == "insert":
                raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
            return super().encode(ids, mask)

        def decode(self, tokens, cache, offsets):
            if stage == "step" and max(map(len, cache.sources)) > 9:
                raise TypeError("of a secret text")
            return super().decode(tokens, cache, offsets)

    def table(source, seen):
        bad = stage == "logits" and len(source) > 9 and len(seen) > 2
        return ENDLESS(source, seen) * (float("nan") if bad else 1)

    served = serve(Breaking(table, V), max_batch=1, max_queue=0)
    job = served.submit([[2], [3] * 10, [4], [5]], size=1, max_tokens=6, document=True)
    results = job.results()
    messages = {"step": "internal error", "insert": "no memory", "logits": "NaN"}
    assert [r.finish_reason for r in results] == ["length", "error", "length", "length"]
    assert messages[stage] in results[1].error and "secret" not in results[1].error
    assert [len(r.tokens) for r in results] == [6, 0, 6, 6]
    until(lambda: served.worker.rows == (0, 0))


def test_its_pieces_end_with_its_client(serve):
    served = serve(max_batch=2)
    job = served.submit_held([[2]] * 1000, size=2, max_tokens=5, document=True)
    served.worker.jobs.cancel(job.job)
    served.release()
    until(lambda: served.worker.rows == (0, 0))
    assert job.events.qsize() < 10
    assert len(served.submit([[4]], max_tokens=3).results()) == 1
