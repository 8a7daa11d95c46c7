"""A thread that serves a fake model."""

import pytest

from decoder import SpeculativeDecoder
from fake_model import drafter, good
from fake_serving import FLAT, PATIENCE, Client, until
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.worker import Worker


@pytest.fixture
def serve():
    """`serve(model, …)`: a worker, which no job may outlive, and a maker of clients."""
    served = []

    def serve(model, max_batch=4, max_queue=8, tokenizer=None, start=True, **options):
        decoder = SpeculativeDecoder(
            model, drafter(good(model.table), model), tokenizer, costs=FLAT
        )
        worker = Worker(lambda: decoder, max_batch, max_queue, Metrics(), **options)
        served.append((worker, model))
        if start:
            worker.start()
            model.calls.clear()
        return worker, lambda: Client(worker, decoder)

    yield serve
    for worker, model in served:
        if gate := getattr(model, "gate", None):
            gate.set()
        if worker.health()[0] == "ok":
            until(lambda worker=worker: worker.rows == (0, 0))
        assert worker.stop(PATIENCE)
