"""Tests that every rank gets, cancels and finishes the same jobs."""

import time

from meeting import meet
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.jobs import GenerationJob, JobQueue, Place, ScoringJob, sent
from mlx_t5.settings import Settings


def jobs():
    """Returns a job of each kind."""
    settings = Settings(temp=0.5, stop=("a",))
    return [
        GenerationJob(settings, 3, 2, logprobs=1, prompts=[[5, 1], [6, 1]], place=Place(4)),
        ScoringJob("score", 2, [Pair((5, 1), (6, 7, 1))]),
        ScoringJob("embed", 2, ids=[[5, 1]], normalize=True),
    ]


def test_ranks_take_the_same_jobs_and_lose_them_in_the_same_round():
    def work(ranks):
        queue, rounds, active_jobs = JobQueue(4, 8, time.monotonic, ranks), [], []
        batch = jobs() if ranks.rank == 0 else []
        for job in batch:
            queue.add(job)
        while (new := queue.next_round(busy=bool(active_jobs))) is not None:
            active_jobs += new
            rounds.append([(sent(job), job.place.cancelled) for job in active_jobs])
            if batch and queue.open:  # a new job meanwhile, as while the server gives up
                queue.close("stopping")
                for job in queue.unfinished():
                    queue.cancel(job)
                assert not any(job.place.cancelled for job in batch), "the others do not know yet"
            for job in [job for job in active_jobs if job.place.cancelled]:
                queue.release(job, job.place.size)
                active_jobs.remove(job)
        return rounds, queue.admitted

    first, second = meet(2, work)
    assert first == second
    assert first == ([[(sent(job), gone) for job in jobs()] for gone in (False, True)], 0)


def test_ranks_get_the_same_pieces_of_a_document_and_stop_when_it_is_whole():
    def work(ranks):
        queue, rounds = JobQueue(4, 8, time.monotonic, ranks), []
        if ranks.rank == 0:
            own_job = GenerationJob(Settings(), document=True, place=Place(2))
            queue.add(own_job)
            queue.extend(own_job, [[5, 1], [6, 1]], False)
            queue.close("stopping")
        (job,) = queue.next_round(busy=False)
        rounds.append((list(job.place.pieces), job.place.whole))
        if ranks.rank == 0:
            queue.extend(own_job, [[7, 1]], True)
        assert queue.next_round(busy=False) == [], "a document is on its way"
        rounds.append((list(job.place.pieces), job.place.whole))
        queue.release(job, 2)
        assert queue.next_round(busy=False) is None
        return rounds

    first, second = meet(2, work)
    assert first == second
    assert first == [([[5, 1], [6, 1]], False), ([[5, 1], [6, 1], [7, 1]], True)]
