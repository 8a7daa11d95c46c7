"""Tests the queue of jobs as the thread that owns MLX sees it."""

import time

from mlx_t5.engine.codec import Job
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.jobs import GenerationJob, JobQueue, ScoringJob
from mlx_t5.settings import Settings


def test_a_closed_queue_ends_when_its_jobs_are_done():
    queue, spec = JobQueue(4, 8, time.monotonic), Job(Settings())
    document = GenerationJob(size=2, texts=3, spec=spec, prompts=["a", "b", "c"])
    scores = ScoringJob(kind="score", prompt_tokens=2, pairs=[Pair((5, 1), (6, 7, 1))])
    for job in (document, scores):
        queue.add(job)
    assert queue.admitted == 3, "a document takes fewer places than it has pieces"
    queue.cancel(scores)
    queue.close("stopping")
    assert queue.next_round(busy=False) == ([document, scores], [scores])
    queue.release(document, 2)
    queue.release(scores, 1)
    assert queue.admitted == 1 and queue.unfinished() == [document]
    assert queue.next_round(busy=True) == ([], [])
    queue.release(document, 1)
    assert queue.next_round(busy=True) is None
