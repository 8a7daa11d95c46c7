"""Requests that take single passes and no decoding: embeddings, scores, ranks.

They are done in the thread that owns MLX, one pass between two steps of the engine, the oldest
first: so a request of many inputs delays the texts that are being decoded no more than a prompt
that joins them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.passes import NotFinite, Part
from mlx_t5.serving.jobs import Failure, PassJob, Values
from mlx_t5.serving.metrics import Metrics


class PassQueue:
    """Those in hand, for the thread that owns MLX."""

    def __init__(
        self,
        decoder: Any,
        metrics: Metrics,
        clock: Callable[[], float],
        release: Callable[[PassJob, int], None],
        put: Callable[[PassJob, Values | Failure], None],
    ) -> None:
        """Works with a decoder's model.

        Args:
            decoder: see `jobs.Decoder`.
            metrics: told what happens.
            clock: seconds.
            release: told that a task leaves, and how many places of the queue it had.
            put: tells a task what became of it.
        """
        self._decoder, self._metrics, self._clock = decoder, metrics, clock
        self._release, self._put = release, put
        self._waiting: deque[PassJob] = deque()
        self._work: Iterator[Part] | None = None  # of the oldest
        self._done: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._waiting)

    def add(self, task: PassJob) -> None:
        """Lets a task wait for its turn."""
        self._waiting.append(task)

    def advance(self) -> None:
        """Makes one pass, if there is a task."""
        while self._waiting and self._waiting[0].cancelled:
            self._leave(None)
        if not self._waiting:
            return
        task = self._waiting[0]
        try:
            if self._work is None:
                self._metrics.queue_seconds.observe(self._clock() - task.submitted)
                self._work = task.parts(self._decoder)
            self._done.update(next(self._work))
            self._check()
        except Exception as error:
            self._leave(failure_of(error))
        else:
            if len(self._done) == task.count:
                self._leave(Values([self._done[i] for i in range(task.count)]))

    def _check(self) -> None:
        """Raises the first error among what is done."""
        error = next((value for value in self._done.values() if isinstance(value, Exception)), None)
        if error is not None:
            raise error

    def _leave(self, outcome: Values | Failure | None) -> None:
        """The oldest task is done; None if nobody waits for it any longer."""
        task = self._waiting.popleft()
        self._work, self._done = None, {}
        self._release(task, task.size)
        if outcome is None:
            self._metrics.cancelled(task.size)
            return
        if isinstance(outcome, Values):
            self._metrics.passed(task.kind, task.count, task.tokens)
        self._put(task, outcome)


def failure_of(error: Exception) -> Failure:
    """What clients are told of an exception."""
    if isinstance(error, NotFinite):
        return Failure("internal", str(error))
    if isinstance(error, UserError):
        return Failure("input", str(error))
    return Failure.from_error(error)
