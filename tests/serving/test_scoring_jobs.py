"""Tests how scores, ranks and embeddings take turns in the thread that owns MLX."""

import queue
import time

import numpy as np
import pytest

from fake_model import FakeModel, random_table
from fake_serving import PATIENCE, V
from mlx_t5.errors import UserError
from mlx_t5.scoring.windows import NotFinite
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.queue import JobQueue, ScoringJob
from mlx_t5.serving.worker import ScoringJobs


class Parts(ScoringJob):
    """A job with one batch for each item of `parts()`."""

    def __init__(self, events, parts, count):
        super().__init__(kind="embed", prompt_tokens=0, ids=[[]] * count, put=events.put)
        self.parts = parts


@pytest.fixture(autouse=True)
def batches(monkeypatch):
    monkeypatch.setattr(ScoringJobs, "_parts", lambda turns, job: job.parts())


def test_forward_passes_take_turns_with_steps(serve):
    """A text continues while a request of three passes is computed."""
    served = serve()
    steps, events = [], queue.Queue()

    def parts():
        for i in range(3):
            steps.append(len(served.model.calls))
            yield [(i, i * i)]

    text = served.submit_held([[4]], max_tokens=9, num_draft=0)
    served.worker.jobs.add(Parts(events, parts, 3))
    served.release()
    assert events.get(timeout=PATIENCE) == [0, 1, 4]
    assert len(text.results()[0].tokens) == 9
    assert np.diff(steps).tolist() == [1, 1], "a step after every pass"


def turns():
    """Returns the turns of jobs, and `begin(job)`, which adds a job."""
    jobs = JobQueue(2, 99, time.monotonic)
    turns = ScoringJobs(None, jobs, Metrics())

    def begin(job):
        jobs.add(job)
        turns.add(job)
        return job

    return turns, begin


def test_requests_take_turns_pass_by_pass():
    """A small request waits for one pass of each earlier request, however large."""
    order, events = [], queue.Queue()

    def named(name, passes):
        def parts():
            for i in range(passes):
                order.append(name)
                yield [(i, name)]

        return begin(Parts(events, parts, passes))

    running, begin = turns()
    named("a", 5)
    running.step()
    named("b", 1)
    gone = named("c", 2)
    while running:
        running.step()
        if "c" in order:
            running.remove(gone)
        if len(order) == 5:
            named("d", 2)
    assert "".join(order) == "aabcaadad"
    assert [events.get_nowait() for _ in range(3)] == [["b"], ["a"] * 5, ["d"] * 2]
    assert events.empty()


@pytest.mark.parametrize(
    "error, status",
    [(UserError("too long"), 400), (NotFinite("NaN"), 500), (OSError(), 500),
     (MemoryError(), 503)],
)  # fmt: skip
def test_a_job_that_fails_harms_nobody(serve, error, status):
    served = serve(FakeModel(random_table(V), V))
    events = queue.Queue()
    served.worker.jobs.add(Parts(events, lambda: iter([[(0, error)]]), 1))
    failure = events.get(timeout=PATIENCE)
    assert failure.status == status
    assert served.submit([[4]], max_tokens=3).results()


def test_a_job_whose_client_has_gone_is_dropped_between_two_passes(serve):
    served = serve(FakeModel(random_table(V), V))
    events, passes = queue.Queue(), []

    def parts():
        for i in range(5):
            passes.append(i)
            served.worker.jobs.cancel(gone)
            yield [(i, i)]

    gone = Parts(events, parts, 5)
    served.worker.jobs.add(gone)
    served.worker.jobs.add(Parts(events, lambda: iter([[(0, "next")]]), 1))
    assert events.get(timeout=PATIENCE) == ["next"]
    assert passes == [0] and events.empty()
