"""Tests documents in the thread that owns MLX: few of their pieces wait at a time."""

import pytest

from fake_serving import ENDLESS, Gated, V, until
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.generation import PIECE_TOKENS


def test_a_request_does_not_wait_for_a_whole_document(serve):
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
    assert other.job.place.unfinished == 0 < long.job.place.unfinished


def test_a_request_goes_before_the_pieces_of_all_documents(serve):
    served = serve(max_batch=4, max_queue=20)
    order, gone = [], lambda name: lambda event: order.append(name)
    many = {"size": 4, "max_tokens": 5, "document": True}
    first = served.submit_held([[2, 3]] * 40, put=gone("document"), **many)
    rest = [served.submit([[2, 3]] * 40, put=gone("document"), **many) for _ in range(2)]
    small = served.submit([[4]], put=gone("small"), max_tokens=5)
    served.release()
    until(lambda: "small" in order)
    assert order.index("small") <= 4 + 3, "in the batch before it, and beside it"
    until(lambda: len(order) == 1 + 3 * 40)
    assert not any(client.job.place.unfinished for client in (first, *rest, small))


def test_a_document_delays_other_rows_only_briefly(serve):
    served, order = serve(max_batch=4), []
    gone = lambda name: lambda event: order.append(name)  # noqa: E731
    other = served.submit_held([[4]], put=gone("other"), max_tokens=40, num_draft=0)
    pieces = [[2] * 500] * 30
    served.submit(pieces, put=gone("piece"), size=4, max_tokens=2, document=True)
    served.release()
    until(lambda: len(order) == 31)
    assert 5 < order.index("other") <= 40 * PIECE_TOKENS / 500, "of 40 steps"
    assert not other.job.place.unfinished


def test_pieces_that_come_late_are_decoded_and_a_stop_waits_for_them(serve):
    served = serve(max_batch=2)
    client = served.submit([[2, 3]], size=1, max_tokens=5, document=True, whole=False)
    client.next()
    served.worker.jobs.close("stopping")
    served.worker.jobs.extend(client.job, [[4]], True)
    assert len(client.next().result.tokens) == 5
    until(lambda: served.worker.rows == (0, 0))


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


def test_a_documents_pieces_end_with_its_client(serve):
    served = serve(max_batch=2)
    job = served.submit_held([[2]] * 1000, size=2, max_tokens=5, document=True)
    served.worker.jobs.cancel(job.job)
    served.release()
    until(lambda: served.worker.rows == (0, 0))
    assert job.events.qsize() < 10
    assert len(served.submit([[4]], max_tokens=3).results()) == 1
