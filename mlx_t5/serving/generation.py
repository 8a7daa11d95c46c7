"""The rows of generation jobs: they wait for a place, share batches, and report to their jobs.

Rows join and leave a running batch between two steps; rows with beams have a batch for each width.
A document has no more rows among them at a time than its job's size, so others need not wait for
all of its pieces.
Rows, chunks and results are made by the decoder that `generate` uses.

Log-probabilities, for the rows that ask for them, are those of the target's own distribution: log
softmax of its logits, before temperature, top-p and `delta`, whoever proposed the token. They are
taken from the pass that verifies, so they cost no other, and rows that do not ask cost nothing.

Symbols: B rows, T positions, V vocabulary, K alternatives, R rows that ask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.engine import batching
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.beams import texts_of
from mlx_t5.sampling.draws import random_keys
from mlx_t5.serving.errors import ApiError, failure_of
from mlx_t5.serving.jobs import Job, JobQueue, TokenLogprob, Update
from mlx_t5.serving.metrics import Metrics, counts


@dataclass(eq=False)
class JobRow:
    """A row and its job.

    Attributes:
        row: as the engine knows it.
        job: whose row it is.
        index: of its first text in the job.
        reported: tokens that the job knows of.
        logprobs: of those that it does not know of.
    """

    row: Row
    job: Job
    index: int
    reported: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)


class GenerationBatches:
    """All rows that are decoded or wait for it, for the thread that owns MLX."""

    def __init__(self, decoder: Any, max_batch: int, jobs: JobQueue, metrics: Metrics):
        """Decodes at most `max_batch` rows of a width at the same time."""
        self._decoder, self._max_batch = decoder, max_batch
        self._jobs, self._metrics = jobs, metrics
        self._job_rows: dict[int, JobRow] = {}  # by id(row); holding the row keeps the id
        self._new_batches([])

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return bool(self._job_rows)

    @property
    def running(self) -> list[Row]:
        """The rows of all batches."""
        return [row for queue in list(self._queues.values()) for row in queue.engine.rows]

    def add(self, job: Job) -> None:
        """Turns a job into rows that wait, of so many texts as it may have at a time."""
        job.coming = self._job_rows_of(job)
        try:
            first = list(islice(job.coming, job.size // job.work.settings.num_return_sequences))
            for job_row in first:
                if job_row.row.error:
                    raise ApiError(400, job_row.row.error)
        except Exception as error:
            self._jobs.release(job, job.size)
            self._jobs.put(job, failure_of(error))
        else:
            self._enqueue(first)

    def _job_rows_of(self, job: Job) -> Iterator[JobRow]:
        """All rows of a job, each made when it is asked for."""
        work, codec, texts = job.work, self._decoder.codec, job.work.settings.num_return_sequences
        places = (i << 32 for i in count()) if work.document else None  # as engine/documents.py
        keys_of = random_keys(work.seed, work.samples // texts, places)
        rows = (
            row
            for prompt, keys in zip(work.prompts, keys_of, strict=False)
            for row in codec.rows(prompt, work.settings, keys, work.watched, work.prediction)
        )
        return (JobRow(row, job, i * texts) for i, row in enumerate(rows))

    def drop_cancelled(self) -> None:
        """Takes the rows of cancelled jobs out."""
        gone = [job_row for job_row in self._job_rows.values() if job_row.job.cancelled]
        if not gone:
            return
        for job_row in gone:
            self._end(job_row)
        self._metrics.cancelled_rows.inc(len(gone))
        for queue in self._queues.values():
            batch = queue.engine
            batch.keep([i for i, row in enumerate(batch.rows) if id(row) in self._job_rows])
            queue.remove([job_row.row for job_row in gone])

    def admit(self) -> None:
        """Lets as many rows into the batches as there is room for."""
        for queue in self._queues.values():
            running = len(queue.engine.rows)
            for row in queue.admit():  # in an empty batch it would fare no better the next time
                self._fail(self._job_rows[id(row)], ApiError(400, str(row.error)))
            now = self._jobs.clock()
            for row in queue.engine.rows[running:]:
                waited = now - self._job_rows[id(row)].job.submitted
                self._metrics.queue_seconds.observe(waited)

    def step(self) -> None:
        """Makes a step of every batch, and reports what it gave."""
        rows = self.running
        before = counts(rows)
        for queue in self._queues.values():
            if queue.engine.rows:
                self._step(queue.engine)
        self._metrics.wrote(*(b - a for a, b in zip(before, counts(rows), strict=True)))
        for row in rows:
            self._report(self._job_rows[id(row)])

    def recover(self, error: Exception) -> None:
        """Gets over an error in an engine: its rows are lost, waiting ones keep waiting."""
        failure = failure_of(error)
        waiting = {id(row) for queue in self._queues.values() for row in queue.waiting}
        for job_row in list(self._job_rows.values()):
            if id(job_row.row) not in waiting:
                self._fail(job_row, failure)  # after which others may wait
        self._new_batches([row for queue in self._queues.values() for row in queue.waiting])
        mx.clear_cache()

    def _new_batches(self, waiting: Sequence[Row]) -> None:
        """Empty batches, and the rows that wait for a place in them."""
        settings = replace(self._decoder.defaults, num_beams=1)
        engine = self._decoder.engine(settings, self._max_batch)
        engine.on_verified = self._recorder = LogprobRecorder(self._alternatives)
        self._queues = {1: batching.Queue(engine, self._max_batch)}  # by width
        self._enqueue([self._job_rows[id(row)] for row in waiting])

    def _enqueue(self, job_rows: Iterable[JobRow]) -> None:
        for job_row in job_rows:
            row = job_row.row
            beams, self._job_rows[id(row)] = row.settings.num_beams, job_row
            if beams not in self._queues:
                batch = self._decoder.engine(row.settings, self._max_batch)
                self._queues[beams] = batching.Queue(batch, self._max_batch)
            self._queues[beams].waiting.append(row)

    def _alternatives(self, row: Row) -> int | None:
        return self._job_rows[id(row)].job.work.logprobs

    def _step(self, batch: Any) -> None:
        began, rows = self._jobs.clock(), len(batch.rows)
        batch.step()
        for row, entries in self._recorder.collect():
            self._job_rows[id(row)].logprobs += entries
        proposals = max((choice.length for choice in batch.choices), default=0)
        self._metrics.stepped(rows, proposals, self._jobs.clock() - began)

    def _report(self, job_row: JobRow) -> None:
        """Sends a job what the last step gave one of its rows."""
        row, job = job_row.row, job_row.job
        texts = texts_of(row) if row.finish_reason else [row]
        if error := next((text.error for text in texts if text.error), None):
            self._fail(job_row, ApiError(500, error))
            return
        if job_row.reported == 0 and row.stats.target_calls == 1:
            self._metrics.first_token_seconds.observe(self._jobs.clock() - job.submitted)
        if not (job.work.stream or row.finish_reason):
            return
        updates = [self._update(job_row, text, i) for i, text in enumerate(texts)]
        job_row.reported = row.decided
        if row.finish_reason:
            self._metrics.finished(row.stats, row.finish_reason)
            seconds = row.stats.encode_seconds + row.stats.decode_seconds
            self._jobs.row_seconds += (seconds - self._jobs.row_seconds) / 8
            self._end(job_row)
        for update in updates:  # last: a client that knows may look at the metrics
            self._jobs.put(job, update)

    def _update(self, job_row: JobRow, text: Row, i: int) -> Update:
        """What one of a row's texts has gained."""
        chunk = self._decoder.codec.chunk(text, job_row.reported)
        # The end token counts where it alone decides about text that was held back.
        count = len(chunk.tokens) or bool(chunk.text)
        logprobs, job_row.logprobs = job_row.logprobs[:count], []
        chunk = replace(chunk, stats=copy.copy(text.stats))  # the thread goes on counting
        return Update(job_row.index + i, chunk, logprobs)

    def _fail(self, job_row: JobRow, failure: ApiError) -> None:
        """Ends a row, and the job with it: its other rows leave before the next step.

        A piece of a document ends by itself.
        """
        row, job = job_row.row, job_row.job
        self._end(job_row)
        if job.work.document:
            row.fail(str(failure))
            self._jobs.put(
                job, Update(job_row.index, self._decoder.codec.chunk(row, row.decided), [])
            )
            return
        self._jobs.cancel(job)
        self._jobs.put(job, failure)

    def _end(self, job_row: JobRow) -> None:
        """Takes a row out; the next one of its job comes in its place, if there is one."""
        job = job_row.job
        del self._job_rows[id(job_row.row)]
        following = [] if job.cancelled else list(islice(job.coming, 1))
        self._enqueue(following)
        if not following:
            self._jobs.release(job, job_row.row.settings.num_return_sequences)


class LogprobRecorder:
    """Listens to an engine's steps: `engine.on_verified = recorder`, and `collect` after a step."""

    def __init__(self, alternatives: Callable[[Row], int | None]) -> None:
        """Records rows with so many alternatives a token; None leaves a row out."""
        self._alternatives = alternatives
        self._rows: list[tuple[Row, int, int]] = []  # with alternatives, and tokens decided before
        self._arrays: tuple[mx.array, ...] = ()

    def __call__(self, rows: Sequence[Row], logits: mx.array, tokens: mx.array) -> None:
        """Takes what a step needs out of logits (B, T, V) and tokens (B, T), lazily."""
        asking = [
            (i, n) for i, row in enumerate(rows) if (n := self._alternatives(row)) is not None
        ]
        self._rows = [(rows[i], n, rows[i].decided) for i, n in asking]
        if asking:
            indices, most = mx.array([i for i, _ in asking]), max(n for _, n in asking)
            self._arrays = logprobs(logits[indices], tokens[indices], most)
            mx.async_eval(*self._arrays)

    def collect(self) -> list[tuple[Row, list[TokenLogprob]]]:
        """What the last step wrote, for each row that asked; EOS included."""
        recorded = []
        arrays = zip(*(array.tolist() for array in self._arrays), strict=True)
        for (row, alternatives, before), of_row in zip(self._rows, arrays, strict=True):
            written = zip(row.committed[1 + before :], *of_row, strict=False)
            entries = [
                TokenLogprob(token, value, list(zip(ids, top, strict=True))[:alternatives])
                for token, value, top, ids in written
            ]
            recorded.append((row, entries))
        self._rows, self._arrays = [], ()
        return recorded


def logprobs(logits: mx.array, tokens: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probabilities of tokens, and of the likeliest ones.

    Args:
        logits: (R, T, V) float32.
        tokens: (R, T) int32.
        count: K, at most V.

    Returns:
        (R, T) float32 of the tokens, (R, T, K) float32 of the likeliest, in falling order, and
        their ids (R, T, K).
    """
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    values = mx.take_along_axis(logits, tokens[..., None], axis=-1) - total
    ids = mx.argsort(-logits, axis=-1)[..., :count]
    top = mx.take_along_axis(logits, ids, axis=-1) - total
    return values[..., 0], top, ids
