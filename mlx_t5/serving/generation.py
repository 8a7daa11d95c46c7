"""Decodes generation jobs: makes rows, batches them, and reports their texts in chunks.

A row is one text in a batch, or one beam search. Rows join and leave a running batch between two
steps; rows with the same number of beams share one batch. The decoder's `Codec` makes the rows,
chunks and results, as for `generate`.

A place that becomes free goes to the waiting job that has the fewest rows in the batches, and among
equals to the oldest. So a small request waits neither for the other prompts of a large one nor for
a whole document, and no job starves.

A row may request log-probabilities. They are the log softmax of the target's logits, before
penalties, temperature, top-p and `delta` (leniency), even for a token that the draft proposed.
Verification computes these logits anyway, so no additional pass is needed.

Symbols: B rows, T positions, V vocabulary, K alternatives, R rows with log-probabilities.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine import batching
from mlx_t5.engine.beams import Beams
from mlx_t5.engine.reuse import AnswerStore
from mlx_t5.engine.rows import Row, TokenLogprob
from mlx_t5.sampling.beam_search import texts_of
from mlx_t5.serving.api_error import ApiError, failure_of
from mlx_t5.serving.jobs import GenerationJob, JobQueue
from mlx_t5.serving.metrics import Metrics, row_counts


class GenerationBatches:
    """All rows (texts or beam searches) that are being decoded, and the jobs with rows to come.

    Only the thread that owns MLX may use this object.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, jobs: JobQueue, metrics: Metrics, answers: AnswerStore
    ):
        self._decoder, self._max_batch = decoder, jobs.max_batch
        self._jobs, self._metrics, self._answers = jobs, metrics, answers
        # The next row of each waiting job, and the rows after it; the oldest job comes first.
        self._waiting: dict[GenerationJob, tuple[Row, Iterator[Row]]] = {}
        self._job_of: dict[Row, GenerationJob] = {}  # rows that are decoded or about to join
        self._new_batches()

    def __bool__(self) -> bool:
        return bool(self._job_of or self._waiting)

    @property
    def running(self) -> list[Row]:
        return [row for queue in list(self._queues.values()) for row in queue.engine.rows]

    def add(self, job: GenerationJob) -> None:
        """Adds a job, whose rows join the batches one by one as places become free."""
        self._advance(job, self._rows(job))

    def _advance(self, job: GenerationJob, rows: Iterator[Row]) -> None:
        """Lets the next of a job's rows wait; a job without further rows waits no longer."""
        if row := next(rows, None):
            self._waiting[job] = row, rows
        else:
            self._waiting.pop(job, None)

    def _rows(self, job: GenerationJob) -> Iterator[Row]:
        # Piece i of a document draws from the stream that engine/document_batch.py gives it.
        indexes = (i << 32 for i in count()) if job.pieces else None
        texts = 0
        try:
            for row in self._decoder.codec.rows(job.prompts, job.spec, indexes):
                row.index, texts = texts, texts + row.settings.num_return_sequences
                yield row
        except Exception as error:
            self._jobs.put(job, failure_of(error))
            self._jobs.cancel(job)

    def remove(self, job: GenerationJob) -> None:
        self._waiting.pop(job, None)
        gone = [row for row, owner in self._job_of.items() if owner is job]
        for row in gone:
            del self._job_of[row]
        for queue in self._queues.values():
            batch = queue.engine
            batch.filter([i for i, row in enumerate(batch.rows) if row in self._job_of])
            queue.remove(gone)
        self._decode_first(self._answers.drop(gone))

    def admit(self) -> None:
        """Moves rows into the batches while these have free places."""
        self._draw()
        for queue in self._queues.values():
            running = len(queue.engine.rows)
            if not running:  # a request that is alone gets the same answer every time
                queue.engine.forget()
            for row in queue.admit():  # these rows do not fit even into an empty batch
                self._fail(row, ApiError(400, str(row.error)))
            now = self._jobs.clock()
            for row in queue.engine.rows[running:]:
                self._metrics.queue_seconds.observe(now - self._job_of[row].submitted)

    def _draw(self) -> None:
        for job in [*self._waiting]:  # a row whose text is known needs no place
            while job in self._waiting and self._answers.has(self._waiting[job][0]):
                self._take_row(job)
        rows_of = Counter(self._job_of.values())
        while self._waiting and self._has_free_place():
            job = min(self._waiting, key=rows_of.__getitem__)
            rows_of[job] += 1
            self._take_row(job)

    def _take_row(self, job: GenerationJob) -> None:
        row, rows = self._waiting[job]
        self._job_of[row] = job
        self._advance(job, rows)
        if row.error:
            self._fail(row, ApiError(400, row.error))
        elif self._answers.claim(row):
            self._queue_of(row).waiting.append(row)
        elif row.finish_reason:
            self._report(row)

    def _has_free_place(self) -> bool:
        queues = self._queues.values()
        return sum(len(q.engine.rows) + len(q.waiting) for q in queues) < self._max_batch

    def step(self) -> None:
        """Runs one step of every batch, and reports the new tokens to the jobs."""
        rows = self.running
        before = row_counts(rows)
        for queue in self._queues.values():
            batch = queue.engine
            if not batch.rows:
                continue
            began, size = self._jobs.clock(), len(batch.rows)
            batch.step()
            for row, entries in self._recorder.collect():
                row.logprobs += entries
            self._metrics.stepped(size, batch.gamma, self._jobs.clock() - began)
        self._metrics.wrote(*(b - a for a, b in zip(before, row_counts(rows), strict=True)))
        for row in rows:
            self._report(row)
        finished, again = self._answers.settle()
        for row in finished:
            self._report(row)
        self._decode_first(again)

    def _decode_first(self, rows: Iterable[Row]) -> None:
        """Adds rows that waited for an equal row, which then failed or left."""
        for row in rows:
            self._queue_of(row).waiting.insert(0, row)

    def recover(self, error: Exception) -> None:
        """Recovers from an error in an engine: fails the running rows, keeps the waiting rows."""
        failure = failure_of(error)
        survivors = {row for queue in self._queues.values() for row in queue.waiting}
        survivors.update(*self._answers.waiting.values())
        for row in [row for row in self._job_of if row not in survivors]:
            self._fail(row, failure)
        waiting = [row for queue in self._queues.values() for row in queue.waiting]
        self._new_batches()
        for row in waiting:
            self._queue_of(row).waiting.append(row)
        mx.clear_cache()

    def _new_batches(self) -> None:
        self._queues: dict[int, batching.Queue] = {}  # by number of beams
        self._recorder = LogprobRecorder(lambda row: self._job_of[row].spec.logprobs)

    def _queue_of(self, row: Row) -> batching.Queue:
        beams = row.settings.num_beams
        if beams not in self._queues:
            batch = self._decoder.engine(row.settings, self._max_batch)
            if not isinstance(batch, Beams):
                batch.on_verified = self._recorder
            self._queues[beams] = batching.Queue(batch, self._max_batch)
        return self._queues[beams]

    def _report(self, row: Row) -> None:
        """Reports a row's new text to its job: after each step for a stream, else at the end."""
        job, texts = self._job_of[row], texts_of(row) if row.finish_reason else [row]
        if error := next((text.error for text in texts if text.error), None):
            self._fail(row, ApiError(500, error))
            return
        if row.reported == 0 and (row.stats.target_calls == 1 or row.stats.reused):
            self._metrics.first_token_seconds.observe(self._jobs.clock() - job.submitted)
        if not (job.spec.stream or row.finish_reason):
            return
        chunks = [self._decoder.codec.chunk(text) for text in texts]
        if row.finish_reason:
            self._metrics.finished(row.stats, row.finish_reason)
            if not row.stats.reused:
                seconds = row.stats.encode_seconds + row.stats.decode_seconds
                self._jobs.row_seconds += (seconds - self._jobs.row_seconds) / 8
            self._end(row)
        for chunk in chunks:  # last, so that the metrics have counted the text
            chunk.stats = copy.copy(chunk.stats)  # the row's stats keep changing
            self._jobs.put(job, chunk)

    def _fail(self, row: Row, failure: ApiError) -> None:
        """Fails a row: a document continues, any other job is cancelled."""
        job = self._job_of[row]
        self._end(row)
        self._decode_first(self._answers.drop([row]))
        if job.pieces:
            row.fail(str(failure))
            row.reported = row.decided  # none of its text is reported
            for text in texts_of(row):
                self._jobs.put(job, self._decoder.codec.chunk(text))
        else:
            self._jobs.cancel(job)
            self._jobs.put(job, failure)

    def _end(self, row: Row) -> None:
        self._jobs.release(self._job_of.pop(row), row.settings.num_return_sequences)


class LogprobRecorder:
    """Records the log-probabilities of the tokens of each step.

    The engine calls the recorder when it verifies proposals. Call `collect` after each step.
    """

    def __init__(self, alternatives: Callable[[Row], int | None]) -> None:
        """`alternatives`: how many likeliest tokens a row asks for; None: no log-probabilities."""
        self._alternatives = alternatives
        self._rows: list[tuple[Row, int, int]] = []  # row, alternatives, tokens decided before
        self._arrays: tuple[mx.array, ...] = ()

    def __call__(self, rows: Sequence[Row], logits: mx.array, tokens: mx.array) -> None:
        """Records the log-probabilities of tokens (B, T), from logits (B, T, V)."""
        asking = [(i, n) for i, n in enumerate(map(self._alternatives, rows)) if n is not None]
        self._rows = [(rows[i], n, rows[i].decided) for i, n in asking]
        if asking:
            indices, most = mx.array([i for i, _ in asking]), max(n for _, n in asking)
            self._arrays = likeliest_logprobs(logits[indices], tokens[indices], most)
            mx.async_eval(*self._arrays)

    def collect(self) -> list[tuple[Row, list[TokenLogprob]]]:
        """Each recorded row with the log-probabilities of its new tokens, EOS included."""
        recorded = []
        arrays = zip(*(array.tolist() for array in self._arrays), strict=True)
        for (row, alternatives, before), of_row in zip(self._rows, arrays, strict=True):
            entries = []
            for token, value, top, ids in zip(row.tokens[1 + before :], *of_row, strict=False):
                likeliest = list(zip(ids, top, strict=True))[:alternatives]
                entries.append(TokenLogprob(token, value, likeliest))
            recorded.append((row, entries))
        self._rows, self._arrays = [], ()
        return recorded


def likeliest_logprobs(
    logits: mx.array, tokens: mx.array, count: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The log-probabilities of given tokens, and of the likeliest tokens.

    Args:
        logits: (R, T, V) float32.
        tokens: (R, T) int32 ids.
        count: K, the number of likeliest tokens to return; at most V.

    Returns:
        The tokens' log-probabilities (R, T), those of the K likeliest tokens in descending order
        (R, T, K), both float32, and the ids of the likeliest tokens (R, T, K).
    """
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    values = mx.take_along_axis(logits, tokens[..., None], axis=-1) - total
    ids = mx.argsort(-logits, axis=-1)[..., :count]
    top = mx.take_along_axis(logits, ids, axis=-1) - total
    return values[..., 0], top, ids
