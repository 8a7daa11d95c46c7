"""The one thread that owns MLX: it loads the models, and requests join and leave its running batch.

MLX's streams belong to the thread that made them, so everything that touches an array happens in
here. Other threads hand in jobs (`submit`) and withdraw them (`cancel`); what becomes of a job is
told through its `put`, which must not wait: a client that reads slowly, or not at all, delays
nobody. Between two steps of the engine, rows that are done or withdrawn leave and waiting ones take
their place; prompts, rows, chunks and results are made by the decoder that `generate` uses.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

import batching
from backend import mx
from decoder import SpeculativeDecoder
from draft_length import AUTO
from prompts import random_keys
from results import Row
from serving.errors import place
from serving.jobs import Failure, Flight, Job, Progress, QueueFull, Stopped
from serving.logprobs import LogprobRecorder
from serving.metrics import Metrics

log = logging.getLogger(__name__)

LONGEST_RETRY = 60  # seconds that a client is asked to wait at most


class Worker:
    """The thread. All its public methods may be called from any other."""

    def __init__(
        self,
        load: Callable[[], SpeculativeDecoder],
        max_batch: int,
        max_queue: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepares the thread.

        Args:
            load: loads the models, in the thread.
            max_batch: rows decoded at the same time.
            max_queue: rows that wait for a place at most.
            metrics: told what happens.
            clock: seconds.
        """
        self.max_batch, self.max_queue = max_batch, max_queue
        self._load, self._metrics, self._clock = load, metrics, clock
        self._loaded: Future[SpeculativeDecoder] = Future()
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._new: list[Job] = []
        self._admitted = 0  # rows of jobs that are not done
        self._withdrawn = self._closing = False
        # Of the thread alone:
        self._flights: dict[int, Flight] = {}  # by id(row); holding the row keeps the id
        self._row_seconds = 0.0  # a row stays in the batch so long, on average over the last ones
        self._recorder = LogprobRecorder()

    # ---- from other threads ----------------------------------------------------------------------

    def start(self) -> SpeculativeDecoder:
        """Starts the thread and waits until it has loaded the models.

        Returns:
            The decoder, for what it knows about the models; its arrays are not to be touched.

        Raises:
            UserError: they cannot be loaded.
        """
        self._thread.start()
        try:
            # A Ctrl-C that comes just before a wait begins does not end it, so each is short.
            while not self._loaded.done():
                wait([self._loaded], timeout=0.5)
            return self._loaded.result()
        except Exception:
            self._thread.join()
            raise

    def submit(self, job: Job) -> None:
        """Hands in a job.

        Raises:
            QueueFull: there is no room for its rows.
            Stopped: the thread is ending.
        """
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise Stopped("the server is shutting down")
            if self._admitted + job.size > self.max_batch + self.max_queue:
                raise QueueFull(self._retry_after())
            job.submitted = self._clock()
            self._admitted += job.size
            self._new.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Withdraws a job: its rows leave before the next step. One that is done stays done."""
        with self._changed:
            job.cancelled = self._withdrawn = True
            self._changed.notify()

    def stop(self, timeout: float | None = None) -> bool:
        """Takes no more jobs, finishes those it has and ends; whether it did so in time (s)."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows are in the batch and how many wait for a place."""
        running = len(self._engine.rows)
        return running, max(self._admitted - running, 0)

    def _retry_after(self) -> int:
        turns = self._admitted / self.max_batch
        return max(1, min(math.ceil(turns * self._row_seconds), LONGEST_RETRY))

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            while self._wait():
                self._round()
        finally:
            self._abandon()
            # MLX aborts the process at its end if streams of a thread outlive it.
            mx.synchronize()
            mx.clear_streams()

    def _prepare(self) -> None:
        try:
            self._decoder = self._load()
            self._warm_up()
            self._new_engine()
        except BaseException as error:
            self._closing = True
            self._loaded.set_exception(error)
        else:
            self._loaded.set_result(self._decoder)

    def _warm_up(self) -> None:
        """Reads the weights from disk and compiles kernels, so that no client waits for it."""
        self._decoder.generate([self._decoder.model.config.eos_token_id], max_tokens=8)

    def _new_engine(self, waiting: Sequence[Row] = ()) -> None:
        # With "auto" the costs of steps are measured, so that any request may ask for it.
        usual = replace(self._decoder.defaults, num_draft=AUTO)
        self._engine = self._decoder.engine(usual, self.max_batch)
        self._engine.on_verified = self._recorder
        self._queue = batching.Queue(self._engine, self.max_batch, waiting)

    def _wait(self) -> bool:
        """Waits for something to do; False if there is nothing and never will be."""
        if not self._flights:
            mx.clear_cache()  # buffers kept for the next step; there may be none for long
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._flights or self._closing)
            return bool(self._new or self._flights)

    def _round(self) -> None:
        """Rows leave, rows join, one step, news to everybody."""
        try:
            self._leave()
            self._join()
            rows, before = list(self._engine.rows), self._counts()
            if rows:
                began = self._clock()
                self._engine.step()
                self._record()
                self._metrics.stepped(len(rows), self._clock() - began)
            after = self._counts(rows)
            self._metrics.wrote(*(b - a for a, b in zip(before, after, strict=True)))
            for row in rows:
                self._tell(self._flights[id(row)])
        except Exception as error:
            self._recover(error)

    def _leave(self) -> None:
        """Takes the rows of cancelled jobs out."""
        with self._changed:
            if not self._withdrawn:
                return
            self._withdrawn = False
        gone = [flight for flight in self._flights.values() if flight.job.cancelled]
        for flight in gone:
            self._end(flight)
        self._metrics.cancelled(len(gone))
        left = [i for i, row in enumerate(self._engine.rows) if id(row) in self._flights]
        self._engine.keep(left)
        self._queue.remove(flight.row for flight in gone)

    def _join(self) -> None:
        """Makes rows of new jobs, and lets as many as there is room for into the batch."""
        with self._changed:
            jobs, self._new = self._new, []
        for job in jobs:
            self._take(job)
        running = len(self._engine.rows)
        for row in self._queue.admit():  # alone it would fare no better the next time
            self._fail(self._flights[id(row)], Failure("input", row.error))
        now = self._clock()
        for row in self._engine.rows[running:]:
            self._metrics.queue_seconds.observe(now - self._flights[id(row)].job.submitted)

    def _take(self, job: Job) -> None:
        """Turns a new job into waiting rows, unless its client has gone already."""
        rows: list[Row] = []
        failure = None
        try:
            for prompt, keys in zip(job.prompts, random_keys(job.seed, job.samples), strict=False):
                rows += self._decoder.rows(prompt, job.settings, keys, job.watched)
            failure = next((Failure("input", row.error) for row in rows if row.error), None)
        except Exception as error:
            failure = _failure(error)
        if failure or job.cancelled:
            self._release(job.size)
            if failure:
                self._put(job, failure)
            else:
                self._metrics.cancelled(job.size)
            return
        for index, row in enumerate(rows):
            self._flights[id(row)] = Flight(row, job, index)
            if job.logprobs is not None:
                self._recorder.watch(row, job.logprobs)
        self._queue.waiting += rows

    def _counts(self, rows: list[Row] | None = None) -> tuple[int, int, int, int]:
        """Tokens, target calls, proposals and accepted ones of these rows so far."""
        rows = self._engine.rows if rows is None else rows
        stats = [row.stats for row in rows]
        return (
            sum(row.decided for row in rows),
            sum(s.target_calls for s in stats),
            sum(s.drafted for s in stats),
            sum(s.accepted for s in stats),
        )

    def _record(self) -> None:
        for row, logprobs in self._recorder.collect():
            self._flights[id(row)].logprobs += logprobs

    def _tell(self, flight: Flight) -> None:
        """Tells a job what the last step did for one of its rows."""
        row, job = flight.row, flight.job
        if row.error:
            self._fail(flight, Failure("internal", row.error))
            return
        first = flight.seen == 0 and row.stats.target_calls == 1
        if first:
            self._metrics.first_token_seconds.observe(self._clock() - job.submitted)
        if not (job.stream or row.finish_reason):
            return
        chunk = self._decoder.chunk(row, flight.seen)
        logprobs, flight.logprobs = flight.logprobs[: len(chunk.tokens)], []
        flight.seen = row.decided
        progress = Progress(flight.index, chunk, copy.copy(row.stats), logprobs)
        if row.finish_reason:
            self._metrics.finished(row.stats, row.finish_reason)
            seconds = row.stats.encode_seconds + row.stats.decode_seconds
            self._row_seconds += (seconds - self._row_seconds) / 8
            self._end(flight)
        self._put(job, progress)  # last: a client that knows may look at the metrics

    def _put(self, job: Job, event: Progress | Failure) -> None:
        try:
            job.put(event)
        except RuntimeError:  # the event loop that the client belonged to has ended
            job.cancelled = self._withdrawn = True

    def _fail(self, flight: Flight, failure: Failure) -> None:
        """Ends a row, and the job with it: its other rows leave before the next step."""
        self._end(flight)
        self.cancel(flight.job)
        self._put(flight.job, failure)

    def _end(self, flight: Flight) -> None:
        del self._flights[id(flight.row)]
        self._recorder.forget(flight.row)
        self._release(1)

    def _abandon(self) -> None:
        """The thread ends; if it was not meant to, nobody is left waiting."""
        with self._changed:
            self._closing = True
            jobs = [*self._new, *(flight.job for flight in self._flights.values())]
        for job in jobs:
            self._put(job, Failure("internal", "the server is stopping"))

    def _release(self, rows: int) -> None:
        with self._changed:
            self._admitted -= rows

    def _recover(self, error: Exception) -> None:
        """After an error in the engine: its rows are lost, those that wait go on waiting."""
        failure = _failure(error)
        waiting = set(map(id, self._queue.waiting))
        for flight in list(self._flights.values()):
            if id(flight.row) not in waiting:
                self._fail(flight, failure)
        self._recorder = LogprobRecorder()
        for flight in self._flights.values():
            if flight.job.logprobs is not None:
                self._recorder.watch(flight.row, flight.job.logprobs)
        self._new_engine(self._queue.waiting)
        mx.clear_cache()


def _failure(error: Exception) -> Failure:
    """Logs where an error came from; returns what clients are told."""
    log.error("decoding failed: %s", place(error))
    if isinstance(error, MemoryError) or "alloc" in str(error).lower():
        message = "no memory left for this batch; try again later, or with a shorter prompt"
        return Failure("memory", message)
    return Failure("internal", "internal error; the server's log says where")
