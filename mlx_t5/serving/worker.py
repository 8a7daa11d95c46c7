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
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.engine import batching
from mlx_t5.engine.rows import Row
from mlx_t5.network.ranks import ALONE, Ranks
from mlx_t5.sampling.beams import texts_of
from mlx_t5.sampling.draws import random_keys
from mlx_t5.serving.errors import STOPPING_MESSAGE, place
from mlx_t5.serving.intake import Intake
from mlx_t5.serving.jobs import Decoder, Failure, Flight, Job, PassJob, Progress
from mlx_t5.serving.logprobs import LogprobRecorder
from mlx_t5.serving.metrics import Metrics, counts
from mlx_t5.serving.pass_queue import PassQueue
from mlx_t5.serving.shared_intake import SharedIntake
from mlx_t5.serving.warm_up import warm_up
from mlx_t5.settings import AUTO

log = logging.getLogger(__name__)

STALL_SECONDS = 60  # without a step, although there is something to do
FAILED = 2  # exit status
BROKEN_MESSAGE = "decoding has ended because of an internal error; the server has to be restarted"


class Worker:
    """The thread. All its public methods may be called from any other."""

    def __init__(
        self,
        load: Callable[[], Decoder],
        max_batch: int,
        max_queue: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks = ALONE,
    ):
        """Prepares the thread.

        Args:
            load: loads the models, in the thread.
            max_batch: rows decoded at the same time.
            max_queue: rows that wait for a place at most.
            metrics: told what happens.
            clock: seconds.
            ranks: that share the model; each has a thread like this.
        """
        self.max_batch, self.max_queue = max_batch, max_queue
        self._load, self._metrics, self._clock = load, metrics, clock
        self._broken, self._ranks = False, ranks
        self._loaded: Future[Decoder] = Future()
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        taken = max_batch, max_queue, clock
        self._intake = Intake(*taken) if ranks.size == 1 else SharedIntake(*taken, ranks)
        # Of the thread alone:
        self._flights: dict[int, Flight] = {}  # by id(row); holding the row keeps the id
        self._row_seconds = 0.0  # a row stays in the batch so long, on average over the last ones
        self._recorder = LogprobRecorder()

    # ---- from other threads ----------------------------------------------------------------------

    def start(self) -> Decoder:
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

    def submit(self, job: Job | PassJob) -> None:
        """Hands in a job or a task.

        Raises:
            QueueFull: there is no room for its rows.
            Stopped: the thread is ending.
        """
        self._intake.add(job, self._row_seconds)

    def cancel(self, job: Job | PassJob) -> None:
        """Withdraws a job: its rows leave before the next step. One that is done stays done."""
        self._intake.withdraw(job)

    def stop(self, timeout: float | None = None) -> bool:
        """Takes no more jobs and finishes the others; returns whether that was in time."""
        self._intake.close(STOPPING_MESSAGE)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def follow(self) -> int:
        """Does what rank 0 takes, until that stops; returns an exit status.

        Raises:
            UserError: the models cannot be loaded.
        """
        self.start()
        self._thread.join()
        return 0

    def give_up(self) -> None:
        """Takes no more jobs, withdraws the others and tells whoever waits for them."""
        self._intake.close(STOPPING_MESSAGE)
        for job in self._intake.unfinished():
            self.cancel(job)
            self._put(job, Failure("stopping", STOPPING_MESSAGE))

    @property
    def alive(self) -> bool:
        """Whether the thread takes jobs."""
        return self._thread.is_alive() and self._intake.open

    def health(self) -> tuple[str, str | None]:
        """Returns a status ("ok", "stopping", "failed", "stalled") and why; None if it is ok."""
        if self._broken:
            return "failed", BROKEN_MESSAGE
        if not self.alive:
            return "stopping", STOPPING_MESSAGE
        if (waited := self._intake.waited) > STALL_SECONDS:
            return "stalled", f"decoding hangs: no step has ended for {waited:.0f} s"
        return "ok", None

    @property
    def rows(self) -> tuple[int, int]:
        """The number of rows in the batch, and the number that wait for a place."""
        admitted, running = self._intake.admitted, len(self._running)
        return running, max(admitted - running, 0)

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            while self._wait():
                self._round()
                self._intake.progressed()
        except BaseException as error:  # no traceback: it may show what was being decoded
            self._broken = True
            log.error("the thread that decodes has ended: %s", place(error))
        finally:
            self._abandon()
            if self._broken and self._ranks.size > 1:
                os._exit(FAILED)  # the others wait for this one, and the launcher ends them
            # MLX aborts the process at its end if streams of a thread outlive it.
            mx.synchronize()
            mx.clear_streams()

    def _prepare(self) -> None:
        try:
            self._decoder = self._load()
            warm_up(self._decoder, self.max_batch)
            told = self._metrics, self._clock, self._intake.release, self._put
            self._passes = PassQueue(self._decoder, *told)
            self._new_batches()
        except BaseException as error:
            self._intake.close(STOPPING_MESSAGE)
            self._loaded.set_exception(error)
        else:
            self._loaded.set_result(self._decoder)

    def _new_batches(self, waiting: Sequence[Row] = ()) -> None:
        """An engine, which is always there; rows that search have a batch for each width."""
        # With "auto" the costs of steps are measured, so that any request may ask for it.
        usual = replace(self._decoder.defaults, num_draft=AUTO, num_beams=1)
        engine = self._decoder.engine(usual, self.max_batch)
        engine.on_verified = self._recorder
        self._queues = {1: batching.Queue(engine, self.max_batch)}
        self._enqueue(waiting)

    def _enqueue(self, rows: Sequence[Row]) -> None:
        """Lets rows wait for a place in the batch for as many beams."""
        for row in rows:
            beams = row.settings.num_beams
            if beams not in self._queues:
                batch = self._decoder.beams(row.settings)
                self._queues[beams] = batching.Queue(batch, self.max_batch)
            self._queues[beams].waiting.append(row)

    @property
    def _running(self) -> list[Row]:
        """The rows of all batches."""
        return [row for queue in list(self._queues.values()) for row in queue.engine.rows]

    def _wait(self) -> bool:
        """Waits for work; returns False if no more will come."""
        busy = bool(self._flights or self._passes)
        if not busy:
            mx.clear_cache()  # buffers kept for the next step; there may be none for long
        return self._intake.wait(busy)

    def _round(self) -> None:
        """One round: rows leave, rows join, a step, and everybody is told."""
        try:
            self._leave()
            self._join()
            self._passes.advance()
            rows = self._running
            before = counts(rows)
            for queue in self._queues.values():
                if queue.engine.rows:
                    self._step(queue.engine)
            self._metrics.wrote(*(b - a for a, b in zip(before, counts(rows), strict=True)))
            for row in rows:
                self._tell(self._flights[id(row)])
        except Exception as error:
            if self._ranks.size > 1:
                raise  # the others may have got further
            self._recover(error)

    def _step(self, batch: Any) -> None:
        began, rows = self._clock(), len(batch.rows)
        batch.step()
        self._record()
        self._metrics.stepped(rows, self._clock() - began)

    def _leave(self) -> None:
        """Takes the rows of cancelled jobs out."""
        if not self._intake.take_withdrawn():
            return
        gone = [flight for flight in self._flights.values() if flight.job.cancelled]
        for flight in gone:
            self._end(flight)
        self._metrics.cancelled(len(gone))
        for queue in self._queues.values():
            batch = queue.engine
            batch.keep([i for i, row in enumerate(batch.rows) if id(row) in self._flights])
            queue.remove([flight.row for flight in gone])

    def _join(self) -> None:
        """Makes rows of new jobs, and lets as many as there is room for into the batch."""
        for job in self._intake.take():
            if isinstance(job, PassJob):
                self._passes.add(job)
            else:
                self._take(job)
        for queue in self._queues.values():
            running = len(queue.engine.rows)
            for row in queue.admit():  # alone it would fare no better the next time
                self._fail(self._flights[id(row)], Failure("input", str(row.error)))
            now = self._clock()
            for row in queue.engine.rows[running:]:
                self._metrics.queue_seconds.observe(now - self._flights[id(row)].job.submitted)

    def _take(self, job: Job) -> None:
        """Turns a new job into waiting rows, unless its client has gone already."""
        rows: list[Row] = []
        failure, texts = None, job.settings.num_return_sequences
        try:
            keys_of = random_keys(job.seed, job.samples // texts)
            for prompt, keys in zip(job.prompts, keys_of, strict=False):
                rows += self._decoder.codec.rows(prompt, job.settings, keys, job.watched)
            failure = next((Failure("input", row.error) for row in rows if row.error), None)
        except Exception as error:
            failure = Failure.from_error(error)
        if failure or job.cancelled:
            self._intake.release(job, job.size)
            if failure:
                self._put(job, failure)
            else:
                self._metrics.cancelled(job.size)
            return
        for index, row in enumerate(rows):
            self._flights[id(row)] = Flight(row, job, index * texts)
            if job.logprobs is not None:
                self._recorder.watch(row, job.logprobs)
        self._enqueue(rows)

    def _record(self) -> None:
        for row, logprobs in self._recorder.collect():
            self._flights[id(row)].logprobs += logprobs

    def _tell(self, flight: Flight) -> None:
        """Tells a job what the last step did for one of its rows."""
        row, job = flight.row, flight.job
        texts = texts_of(row) if row.finish_reason else [row]
        if error := next((text.error for text in texts if text.error), None):
            self._fail(flight, Failure("internal", error))
            return
        first = flight.seen == 0 and row.stats.target_calls == 1
        if first:
            self._metrics.first_token_seconds.observe(self._clock() - job.submitted)
        if not (job.stream or row.finish_reason):
            return
        progress = [self._progress(flight, text, i) for i, text in enumerate(texts)]
        flight.seen = row.decided
        if row.finish_reason:
            self._metrics.finished(row.stats, row.finish_reason)
            seconds = row.stats.encode_seconds + row.stats.decode_seconds
            self._row_seconds += (seconds - self._row_seconds) / 8
            self._end(flight)
        for event in progress:  # last: a client that knows may look at the metrics
            self._put(job, event)

    def _progress(self, flight: Flight, text: Row, i: int) -> Progress:
        """What one of a row's texts has gained."""
        chunk = self._decoder.codec.chunk(text, flight.seen)
        # The end token counts where it alone decides about text that was held back.
        count = len(chunk.tokens) or bool(chunk.text)
        logprobs, flight.logprobs = flight.logprobs[:count], []
        return Progress(flight.index + i, chunk, copy.copy(text.stats), logprobs)

    def _put(self, job: Job | PassJob, event: Any) -> None:
        try:
            job.put(event)
        except RuntimeError:  # the event loop that the client belonged to has ended
            self._intake.withdraw(job)

    def _fail(self, flight: Flight, failure: Failure) -> None:
        """Ends a row, and the job with it: its other rows leave before the next step."""
        self._end(flight)
        self.cancel(flight.job)
        self._put(flight.job, failure)

    def _end(self, flight: Flight) -> None:
        del self._flights[id(flight.row)]
        self._recorder.forget(flight.row)
        self._intake.release(flight.job, flight.row.settings.num_return_sequences)

    def _abandon(self) -> None:
        """The thread ends; if it was not meant to, nobody is left waiting."""
        reason = BROKEN_MESSAGE if self._broken else STOPPING_MESSAGE
        for job in self._intake.abandon(reason):
            self._put(job, Failure("internal", BROKEN_MESSAGE))

    def _recover(self, error: Exception) -> None:
        """Recovers from an error in the engine: its rows are lost, waiting ones keep waiting."""
        failure = Failure.from_error(error)
        left = [row for queue in self._queues.values() for row in queue.waiting]
        waiting = set(map(id, left))
        for flight in list(self._flights.values()):
            if id(flight.row) not in waiting:
                self._fail(flight, failure)
        self._recorder = LogprobRecorder()
        for flight in self._flights.values():
            if flight.job.logprobs is not None:
                self._recorder.watch(flight.row, flight.job.logprobs)
        self._new_batches(left)
        mx.clear_cache()
