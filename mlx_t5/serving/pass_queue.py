"""Requests that take single passes and no decoding: embeddings, scores, ranks.

They are done in the thread that owns MLX, one pass between two steps of the engine, and take turns
pass by pass. So a request of many inputs delays the texts that are being decoded no more than a
prompt that joins them, and another such request by one pass for each of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_t5.errors import RanksApart, UserError
from mlx_t5.scoring.pairs import LastEncoded
from mlx_t5.scoring.passes import NotFinite, Part
from mlx_t5.serving.jobs import Failure, PassJob, Values
from mlx_t5.serving.metrics import Metrics


@dataclass
class QueuedTask:
    """A task, and how far it has come.

    Attributes:
        task: of the client.
        parts: its passes, once it has begun.
        done: what they have given, by place.
    """

    task: PassJob
    parts: Iterator[Part] | None = None
    done: dict[int, Any] = field(default_factory=dict)


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
        self._waiting: deque[QueuedTask] = deque()
        self._last_encoded = LastEncoded()  # of all tasks, as they take turns

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._waiting)

    def add(self, task: PassJob) -> None:
        """Lets a task wait for its turn."""
        self._waiting.append(QueuedTask(task))

    def advance(self) -> None:
        """Makes one pass, of the task whose turn it is."""
        while self._waiting and self._waiting[0].task.cancelled:
            self._leave(self._waiting.popleft().task, None)
        if not self._waiting:
            return
        queued = self._waiting.popleft()
        task, done = queued.task, queued.done
        try:
            self._pass(queued)
        except RanksApart:
            raise
        except Exception as error:
            self._leave(task, failure_of(error))
        else:
            if len(done) == task.count:
                self._leave(task, Values([done[i] for i in range(task.count)]))
            else:
                self._waiting.append(queued)

    def _pass(self, queued: QueuedTask) -> None:
        """Makes one pass; raises the first error among what it gives."""
        if queued.parts is None:
            self._metrics.queue_seconds.observe(self._clock() - queued.task.submitted)
            queued.parts = queued.task.parts(self._decoder, self._last_encoded)
        found = dict(next(queued.parts))
        error = next((value for value in found.values() if isinstance(value, Exception)), None)
        if error is not None:
            raise error
        queued.done |= found

    def _leave(self, task: PassJob, outcome: Values | Failure | None) -> None:
        """A task is done; None if nobody waits for it any longer."""
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
