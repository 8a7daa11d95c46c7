"""The one thread that owns MLX: it loads the models and does the jobs of the queue.

MLX's streams belong to the thread that made them, so only this thread uses arrays. Other threads
submit and cancel jobs (`JobQueue`). Events go back through a job's `put`, which must not wait, so
that a client that reads slowly delays nobody. In every round of the thread's loop, new jobs join
and cancelled jobs leave. Then one scoring or embedding job makes a forward pass, and every batch
makes a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from mlx_t5.backend import cpu_only, mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.reuse import AnswerStore
from mlx_t5.engine.scheduler import MAX_JOINING_TOKENS
from mlx_t5.errors import UserError
from mlx_t5.network.compiled import compile_at_once
from mlx_t5.network.encoding import cache_of
from mlx_t5.scoring.pairs import LastEncoded, Pair
from mlx_t5.scoring.windows import NotFinite, Part
from mlx_t5.serving.api_error import STOPPING_MESSAGE, ApiError, failure_of, raised_at
from mlx_t5.serving.generation import GenerationBatches
from mlx_t5.serving.limits import MAX_BEAMS, MAX_NUM_DRAFT
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.queue import Event, GenerationJob, JobQueue, QueuedJob, ScoringJob

log = logging.getLogger(__name__)

STALL_SECONDS = 60  # if no step ends for so long while there are jobs, the status is "stalled"
BROKEN_MESSAGE = "decoding has ended because of an internal error; the server has to be restarted"
DUMMY_TOKENS = 8  # length of the dummy prompt, and of its text
SAMPLED: dict[str, Any] = {"temp": 1.0}
# Kinds of requests that use different kernels; exact decoding does not support the INEXACT_KINDS.
KINDS: tuple[dict[str, Any], ...] = ({}, SAMPLED, SAMPLED | {"top_k": 9, "top_p": 0.9})
INEXACT_KINDS = ({"delta": 0.5}, SAMPLED | {"delta": 0.5}, {"num_beams": MAX_BEAMS})


class Worker:
    """The thread that owns MLX. Other threads may call the public methods."""

    def __init__(
        self,
        load: Callable[[], Any],
        max_batch: int,
        max_queue: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        answers: int = 0,
    ):
        """Prepares the thread.

        Args:
            load: returns the decoder with loaded models; called in the thread.
            max_batch: maximum number of rows decoded at the same time.
            max_queue: maximum number of waiting rows.
            metrics: the server's metrics.
            clock: returns seconds.
            answers: maximum number of finished answers to keep for equal texts.
        """
        self.max_batch = max_batch
        self._load_decoder, self._metrics, self._answers = load, metrics, answers
        self.jobs = JobQueue(max_batch, max_queue, clock)
        self._broken = False
        self._loaded: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)

    # ---- from other threads ----------------------------------------------------------------------

    def load(self) -> None:
        """Makes the thread load the models, and does not wait for it."""
        self._thread.start()

    def start(self) -> Any:
        """Loads the models, unless `load` does so already; waits, and returns the decoder."""
        if self._thread.ident is None:
            self.load()
        try:
            # The waits are short, as a Ctrl-C just before a wait does not end it.
            while not self._loaded.done():
                wait([self._loaded], timeout=0.5)
            return self._loaded.result()  # its arrays belong to the thread
        except Exception:
            self._thread.join()
            raise

    def stop(self, timeout: float | None = None) -> bool:
        """Accepts no more jobs; waits up to `timeout` seconds; returns whether all jobs ended."""
        self.jobs.close(STOPPING_MESSAGE)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Accepts no more jobs, cancels the unfinished jobs, and sends their clients an error."""
        self.jobs.close(STOPPING_MESSAGE)
        for job in self.jobs.unfinished():
            self.jobs.cancel(job)
            self.jobs.put(job, ApiError(503, STOPPING_MESSAGE))

    def health(self) -> tuple[str, str | None]:
        """A status ("ok", "stopping", "failed", "stalled") and a reason (None for "ok")."""
        if self._broken:
            return "failed", BROKEN_MESSAGE
        if not (self._thread.is_alive() and self.jobs.open):
            return "stopping", STOPPING_MESSAGE
        waited = self.jobs.waited
        if waited > STALL_SECONDS:
            return "stalled", f"decoding hangs: no step has ended for {waited:.0f} s"
        return "ok", None

    @property
    def rows(self) -> tuple[int, int]:
        """The number of rows in the batches, and the number of other places taken in the queue."""
        admitted, running = self.jobs.admitted, len(self._generation.running)
        return running, max(admitted - running, 0)

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._prepare():
                while self._round():
                    pass
        except BaseException as error:  # no traceback, as it may show a client's text
            self._broken = True
            log.error("the thread that decodes has ended: %s", raised_at(error))
        finally:
            self.jobs.close(BROKEN_MESSAGE if self._broken else STOPPING_MESSAGE)
            for job in self.jobs.unfinished():  # so that no client keeps waiting
                self.jobs.put(job, ApiError(500, BROKEN_MESSAGE))
                self.jobs.release(job, job.unfinished)
            # MLX aborts the process at exit if streams outlive their thread.
            mx.synchronize()
            mx.clear_streams()

    def _prepare(self) -> bool:
        try:
            decoder = self._load_decoder()
            warm_up(decoder, self.max_batch)
            answers = AnswerStore(decoder.model.config.eos_token_ids, self._answers)
            self._generation = GenerationBatches(decoder, self.jobs, self._metrics, answers)
            self._scoring = ScoringJobs(decoder, self.jobs, self._metrics)
        except BaseException as error:
            self._loaded.set_exception(error)
            return False
        observe = self._metrics.observe
        observe("t5_batch_rows", "Rows being decoded", lambda: self.rows[0])
        observe("t5_queue_rows", "Rows waiting for a place", lambda: self.rows[1])
        observe("t5_batch_capacity", "Rows decoded at most", lambda: self.max_batch)
        observe("t5_stored_answers", "Answers kept for equal texts", lambda: len(answers.answers))
        self._loaded.set_result(decoder)
        return True

    def _round(self) -> bool:
        """Waits for work and does some of it; False if the queue is closed and empty."""
        busy = bool(self._generation or self._scoring)
        changes = self.jobs.next_round(busy)
        if changes is None:
            return False
        if not (busy or self.jobs.admitted):
            mx.clear_cache()  # after a time without requests, kept buffers are freed
        new, cancelled = changes
        try:
            for job in new:
                self._batches_of(job).add(job)
            for job in cancelled:
                self._metrics.cancelled_rows.inc(job.unfinished)
                self.jobs.release(job, job.unfinished)
                self._batches_of(job).remove(job)
            self._scoring.step()
            self._generation.step()
        except Exception as error:
            self._generation.recover(error)
        return True

    def _batches_of(self, job: QueuedJob) -> Any:
        return self._generation if isinstance(job, GenerationJob) else self._scoring


class ScoringJobs:
    """The jobs that need forward passes but no decoding: scores, ranks and embeddings.

    They are served round robin, one forward pass at a time. Decoding waits for such a pass about as
    long as for the encoding of a new prompt. So a request with many inputs blocks nobody, and the
    passes of two such requests alternate.
    """

    def __init__(self, decoder: SpeculativeDecoder, jobs: JobQueue, metrics: Metrics):
        self._decoder, self._jobs, self._metrics = decoder, jobs, metrics
        self._waiting: deque[tuple[ScoringJob, Iterator[Part]]] = deque()
        self._last_encoded = LastEncoded()  # shared by all jobs

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: ScoringJob) -> None:
        self._waiting.append((job, self._parts(job)))

    def remove(self, job: ScoringJob) -> None:
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not job)

    def step(self) -> None:
        """Makes one forward pass for the first job, which then waits behind the others."""
        if not self._waiting:
            return
        job, parts = self._waiting.popleft()
        if not job.values:
            self._metrics.queue_seconds.observe(self._jobs.clock() - job.submitted)
        event: Event
        try:
            for index, value in next(parts):
                if isinstance(value, Exception):
                    raise value
                job.values[index] = value
        except UserError as error:
            event = ApiError(500 if isinstance(error, NotFinite) else 400, str(error))
        except Exception as error:
            event = failure_of(error)
        else:
            if len(job.values) < job.count:
                self._waiting.append((job, parts))
                return
            event = [job.values[i] for i in range(job.count)]
            self._metrics.scored(job.kind, job.count, job.prompt_tokens)
        self._jobs.release(job, job.unfinished)
        self._jobs.put(job, event)

    def _parts(self, job: ScoringJob) -> Iterator[Part]:
        """A job's scores or vectors in parts, each of one forward pass."""
        size, most = self._jobs.max_batch, MAX_JOINING_TOKENS
        if job.kind == "embed":
            return self._decoder.embeddings.parts(job.ids, size, job.normalize, most)
        return self._decoder.scoring.parts(job.pairs, size, most, self._last_encoded)


def warm_up(decoder: SpeculativeDecoder, batch_size: int) -> None:
    """Warms up the models, so that the first requests do not wait for weights or kernels.

    A model that is only an encoder embeds a dummy prompt; any other decodes one. A GPU compiles a
    kernel when it is first used, so on a GPU each kind of request with kernels of its own follows.
    Last, the target makes passes over as many positions as have kernels of their own.
    """
    model, num_draft = decoder.model, decoder.defaults.num_draft
    prompt = [model.config.eos_token_id] * DUMMY_TOKENS
    if not model.can_decode:
        decoder.embed([prompt])
        return
    compile_at_once(model, decoder.draft and decoder.draft.model)
    # The number of proposals is fixed, so that "auto" learns nothing from dummy texts.
    fixed = num_draft if isinstance(num_draft, int) else 1
    common: Any = {"max_tokens": DUMMY_TOKENS, "batch_size": batch_size, "num_draft": fixed}
    decoder.generate([prompt], **common)
    if not cpu_only():
        prompts = [prompt, prompt[1:]]
        for settings in KINDS if decoder.exact else KINDS + INEXACT_KINDS:
            decoder.generate(prompts, **common, **settings)
        list(decoder.scoring.parts([Pair(tuple(prompt), (0,))], batch_size))
        list(decoder.embeddings.parts(prompts, batch_size, True))
    if decoder.exact:  # all its passes have the same number of positions
        return
    most = 0
    if decoder.draft or decoder.copy:
        # A GPU has kernels for each width, and a request may ask for more; a CPU has them for one
        # position and for several.
        most = 1 if cpu_only() else max(fixed, MAX_NUM_DRAFT)
    cache = cache_of(model, [prompt])
    for width in range(1, most + 2):
        mx.eval(model.decode(mx.array([prompt[:1] * width], mx.int32), cache, [0]))
