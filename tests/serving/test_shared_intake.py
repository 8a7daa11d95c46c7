"""Jobs of rank 0 on every rank: taken, withdrawn and ended in the same rounds."""

import time

from meeting import Meeting
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.jobs import Job, Pairs, PassJob, Prompts
from mlx_t5.serving.shared_intake import SharedIntake
from mlx_t5.settings import Settings


def jobs():
    """One of each kind."""
    told = []
    scored = Pairs([Pair((5, 1), (6, 7, 1))], 4, 1024)
    return [
        Job([[5, 1], [6, 1]], Settings(temp=0.5, stop=("a",)), 3, told.append, samples=2),
        PassJob("score", scored, 1, 2, 1, told.append),
        PassJob("embed", Prompts([[5, 1]], True, 4, 1024), 1, 2, 1, told.append),
    ]


def test_ranks_take_the_same_jobs_and_lose_them_in_the_same_round():
    def work(ranks):
        intake, rounds = SharedIntake(4, 8, time.monotonic, ranks), []
        asked = jobs() if ranks.rank == 0 else []
        for job in asked:
            intake.add(job, 0.0)
        taken = []
        for step in range(5):
            if not intake.wait(busy=bool(taken)):
                rounds.append("none will come")
                break
            taken += intake.take()
            rounds.append([job.cancelled for job in taken])
            if step == 0 and asked:  # meanwhile, as when the server gives up
                intake.close("stopping")
                for job in intake.unfinished():
                    intake.withdraw(job)
                assert not any(job.cancelled for job in asked), "the others do not know yet"
            if intake.take_withdrawn():
                for job in taken:
                    intake.release(job, job.size)
                asked_for = [repr(getattr(job, "settings", None) or job.parts) for job in taken]
                rounds += [asked_for, [job.size for job in taken]]
                taken = []
        return rounds, intake.admitted

    first, second = Meeting(2).run(work)
    assert first == second and first[1] == 0
    rounds = first[0]
    assert rounds[:2] == [[False] * 3, [True] * 3] and rounds[-1] == "none will come"
    assert len(set(rounds[2])) == 3 and rounds[3] == [4, 1, 1]
