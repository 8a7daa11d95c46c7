"""The jobs that ranks which share a model take together: those of rank 0, once a round.

Every rank has a thread that decodes, and all of these run the same loop. What clients ask, and who
has gone, only rank 0 knows; it tells the others before each round, as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any

from mlx_t5.network.ranks import Ranks
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving.intake import Intake
from mlx_t5.serving.jobs import Job, Pairs, PassJob, Prompts
from mlx_t5.settings import Settings

IDLE_SECONDS = 0.05  # between two rounds with nothing to do, as waiting in a collective is work
_NAMES = ("prompts", "seed", "samples", "stream", "pieces", "logprobs")  # of a `Job`


class SharedIntake(Intake):
    """See `Intake`; on other ranks than 0 it takes no jobs but those of rank 0."""

    def __init__(self, max_batch: int, max_queue: int, clock: Callable[[], float], ranks: Ranks):
        """Takes jobs until rank 0 is closed."""
        super().__init__(max_batch, max_queue, clock)
        self._ranks, self._numbers = ranks, count()
        self._known: dict[int, Job | PassJob] = {}  # those that are not done, on every rank
        self._gone: list[Job | PassJob] = []  # of rank 0: withdrawn since the last round
        self._taken: list[Job | PassJob] = []

    def withdraw(self, job: Job | PassJob) -> None:
        """See `Intake`; it counts from the next round on, when all ranks know."""
        with self._changed:
            self._gone.append(job)
            self._changed.notify()

    def wait(self, busy: bool) -> bool:
        """Begins a round on all ranks, with what has come; False if none will come any longer."""
        if not busy and self._ranks.rank:
            time.sleep(IDLE_SECONDS)
        elif not busy:
            with self._changed:
                self._changed.wait_for(lambda: self._new or self._closed is not None, IDLE_SECONDS)
        if self._ranks.rank:
            self._gone.clear()  # rank 0 tells of the same
        told = self._news(busy) if self._ranks.rank == 0 else None
        new, gone, last = self._ranks.shared(told)
        for number, described in new if self._ranks.rank else ():
            job = _job_of(described)
            with self._changed:
                self._known[number] = job
                self._left[job] = job.size
                self._taken.append(job)
        for number in gone:
            if number in self._known:
                self._known[number].cancelled = self._withdrawn = True
        return not last

    def take(self) -> list[Job | PassJob]:
        """The jobs of this round, once."""
        jobs, self._taken = self._taken, []
        return jobs

    def release(self, job: Job | PassJob, rows: int) -> None:
        """See `Intake`."""
        super().release(job, rows)
        if job not in self._left:
            self._known = {n: other for n, other in self._known.items() if other is not job}

    def _news(self, busy: bool) -> list[Any]:
        """What rank 0 tells: new jobs, numbers of those withdrawn, whether this was the last."""
        with self._changed:
            new = {next(self._numbers): job for job in self._new}
            gone, self._new, self._gone = self._gone, [], []
            last = self._closed is not None and not busy and not new
        self._known |= new
        self._taken = list(new.values())
        numbers = {id(job): number for number, job in self._known.items()}
        return [
            [[number, _described(job)] for number, job in new.items()],
            [numbers[id(job)] for job in gone if id(job) in numbers],
            last,
        ]


def _described(job: Job | PassJob) -> dict[str, Any]:
    if isinstance(job, Job):
        return {"settings": asdict(job.settings), **{name: getattr(job, name) for name in _NAMES}}
    assert isinstance(job.parts, (Pairs, Prompts)), "other work cannot be told"
    asked = [type(job.parts).__name__, asdict(job.parts)]
    return {"asked": asked, "kind": job.kind, "count": job.count, "size": job.size}


def _job_of(described: dict[str, Any]) -> Job | PassJob:
    """What rank 0 has described, for a client that is not here."""
    if "asked" not in described:
        facts = {name: described[name] for name in _NAMES}
        return Job(settings=Settings(**described["settings"]), put=_nobody, **facts)
    name, asked = described.pop("asked")
    if name == "Pairs":
        asked["pairs"] = [Pair(tuple(p["source"]), tuple(p["target"])) for p in asked["pairs"]]
    parts = Pairs(**asked) if name == "Pairs" else Prompts(**asked)
    return PassJob(parts=parts, tokens=0, put=_nobody, **described)


def _nobody(event: Any) -> None:
    """Told what becomes of a job whose client is on rank 0."""
