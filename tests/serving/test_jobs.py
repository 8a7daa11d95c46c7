"""Tests the queue of jobs as the thread that owns MLX sees it."""

import time

from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.jobs import GenerationJob, JobQueue, Place, ScoringJob
from mlx_t5.settings import Settings


def test_jobs_are_cancelled_at_the_start_of_a_round():
    queue = JobQueue(4, 8, time.monotonic)
    jobs = [
        GenerationJob(Settings(), prompts=[[5, 1], [6, 1]], place=Place(2)),
        ScoringJob("score", 2, [Pair((5, 1), (6, 7, 1))]),
    ]
    for job in jobs:
        queue.add(job)
    assert queue.next_round(busy=False) == jobs == queue.unfinished()
    for job in jobs:
        queue.cancel(job)
    queue.close("stopping")
    assert not any(job.place.cancelled for job in jobs)
    assert queue.next_round(busy=True) == []
    assert all(job.place.cancelled for job in jobs)
    for job in jobs:
        queue.release(job, job.place.size)
    assert queue.admitted == 0 and queue.next_round(busy=True) is None


def test_a_closed_queue_still_takes_the_pieces_of_a_document():
    queue = JobQueue(4, 8, time.monotonic)
    job = GenerationJob(Settings(), document=True, place=Place(2))
    queue.add(job)
    queue.extend(job, [[5, 1], [6, 1]], False)
    queue.close("stopping")
    assert queue.next_round(busy=False) == [job]
    assert (job.place.pieces, job.place.whole) == ([[5, 1], [6, 1]], False)
    queue.extend(job, [[7, 1]], True)
    assert queue.next_round(busy=False) == []
    assert (job.place.pieces, job.place.whole) == ([[5, 1], [6, 1], [7, 1]], True)
    queue.release(job, 2)
    assert queue.next_round(busy=False) is None
