"""Decodes generation jobs: makes rows, batches them, and reports their texts in chunks.

A row is one text in a batch, or one beam search. Rows join and leave a running batch between two
steps. Rows with the same number of beams share one batch. As in `generate`, the decoder's `Codec`
makes the rows, chunks and results.

A piece of a document becomes a row when a batch has room for it; a document has at most
`Place.size` rows at a time. Ordinary requests (those that are not documents) have priority. While
an ordinary request has a row, pieces become rows slowly: on average, at most `PIECE_TOKENS` of
their source tokens per step. So ordinary requests wait neither for a whole document nor for the
encoding of many pieces.

A row may request log-probabilities. They are the log softmax of the target's logits, before
penalties, temperature, top-p and `delta` (leniency), even for a token that the draft proposed.
Verification computes these logits anyway, so no additional pass is needed.

Symbols: B rows, T positions, V vocabulary, K alternatives, R rows with log-probabilities.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from mlx_t5.backend import mx
from mlx_t5.engine import batching
from mlx_t5.engine.beams import Beams
from mlx_t5.engine.rows import Row, TokenLogprob
from mlx_t5.sampling.beam_search import texts_of
from mlx_t5.serving.api_error import ApiError, failure_of
from mlx_t5.serving.jobs import GenerationJob, JobQueue
from mlx_t5.serving.metrics import Metrics, row_counts

if TYPE_CHECKING:
    from decoder import SpeculativeDecoder
    from mlx_t5.engine.batch import Batch

PIECE_TOKENS = 128  # tokens of pieces that may join per step while ordinary requests have rows


class GenerationBatches:
    """All rows (texts or beam searches) that are being decoded or wait for a place in a batch.

    Only the thread that owns MLX may use this object.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, max_batch: int, jobs: JobQueue, metrics: Metrics
    ):
        """Starts without rows; a batch has up to `max_batch` rows, all with equally many beams."""
        self._decoder, self._max_batch = decoder, max_batch
        self._jobs, self._metrics = jobs, metrics
        self._job_of: dict[Row, GenerationJob] = {}  # of each row, decoding or waiting
        self._documents: deque[GenerationJob] = deque()  # in the order in which pieces are read
        self._allowed = 0  # tokens of pieces that may still join, see `PIECE_TOKENS`
        self._new_batches([])

    def __bool__(self) -> bool:
        """Whether there are rows, or pieces of documents that will become rows."""
        return bool(self._job_of) or any(job.place.pieces for job in self._documents)

    @property
    def running(self) -> list[Row]:
        """The rows that are being decoded, of all batches."""
        return [row for queue in list(self._queues.values()) for row in queue.engine.rows]

    def add(self, job: GenerationJob) -> None:
        """Adds a job and queues its rows; pieces of a document become rows when there is room."""
        if job.document:
            self._documents.append(job)
        else:
            self._begin(job, job.prompts)

    def _begin(self, job: GenerationJob, prompts: Sequence[Sequence[int]]) -> None:
        """Makes rows from prompts and queues them; if a prompt is unusable, the job fails."""
        try:
            rows = list(self._rows(job, prompts))
            if error := next((row.error for row in rows if row.error), None):
                raise ApiError(400, error)
        except Exception as error:
            self._leave(job)
            self._jobs.put(job, failure_of(error))
        else:
            self._job_of |= dict.fromkeys(rows, job)
            self._enqueue(rows)

    def _rows(self, job: GenerationJob, prompts: Sequence[Sequence[int]]) -> Iterator[Row]:
        """Yields the rows of a job's prompts; counts their texts in `Place.texts`."""
        # Pieces come one at a time, and get the same indexes as in engine/document_batch.py.
        for row in self._decoder.codec.rows(prompts, job, count(job.place.texts << 32)):
            row.index = job.place.texts
            job.place.texts += job.settings.num_return_sequences
            yield row

    def _leave(self, job: GenerationJob) -> None:
        """Removes a job from the `JobQueue`, and drops its remaining pieces if it is a document."""
        self._jobs.release(job, job.place.unfinished)
        if job.document:
            self._documents.remove(job)
            job.place.pieces.clear()

    def drop_cancelled(self) -> None:
        """Removes cancelled jobs and their rows."""
        for job in [job for job in self._documents if job.place.cancelled]:
            self._leave(job)
        gone = [row for row, job in self._job_of.items() if job.place.cancelled]
        if not gone:
            return
        for row in gone:
            self._end(row)
        self._metrics.cancelled_rows.inc(len(gone))
        for queue in self._queues.values():
            batch = queue.engine
            batch.keep([i for i, row in enumerate(batch.rows) if row in self._job_of])
            queue.remove(gone)

    def admit(self) -> None:
        """Moves waiting rows into the batches while there is room."""
        self._draw()
        for queue in self._queues.values():
            running = len(queue.engine.rows)
            if not running:  # a request that is alone gets the same answer every time
                queue.engine.forget()
            for row in queue.admit():  # these rows do not fit even into an empty batch
                self._fail(row, ApiError(400, str(row.error)))
            now = self._jobs.clock()
            for row in queue.engine.rows[running:]:
                self._metrics.queue_seconds.observe(now - self._job_of[row].place.submitted)

    def _rows_of(self, job: GenerationJob) -> set[Row]:
        return {row for row, owner in self._job_of.items() if owner is job}

    def _has_unfinished_pieces(self, job: GenerationJob) -> bool:
        """Returns whether a document has pieces without a row, or rows that are not finished."""
        return bool(job.place.pieces or self._rows_of(job))

    def _draw(self) -> None:
        """Makes rows from the pieces of documents while there is room; the documents take turns."""
        is_shared = any(not job.document for job in self._job_of.values())
        most = batching.MAX_JOINING_TOKENS
        allowed = min(self._allowed + PIECE_TOKENS, most) if is_shared else most
        turns = deque(self._documents)
        while turns:
            job = turns.popleft()
            pieces = job.place.pieces
            tokens = min(len(pieces[0]), most) if pieces else 0
            if 0 < tokens <= allowed and self._may_add_row(job, is_shared):
                allowed -= tokens
                self._begin(job, [pieces.pop(0)])
                turns.append(job)
        self._documents.rotate(-1)
        self._allowed = allowed if is_shared else 0

    def _may_add_row(self, job: GenerationJob, is_shared: bool) -> bool:
        """Returns whether the next piece of a document may become a row.

        A document has at most `Place.size` rows. If the batch is full, a piece may still become a
        waiting row, on two conditions: ordinary requests have rows (`is_shared`), and the document
        has no waiting row yet. Without a waiting row, the document would get no place, because
        ordinary requests would take every place that becomes free.
        """
        own, queue = self._rows_of(job), self._queues.get(job.settings.num_beams)
        if queue and len(queue.engine.rows) + len(queue.waiting) >= self._max_batch:
            return is_shared and own.isdisjoint(queue.waiting) and len(own) < job.place.size
        return len(own) < job.place.size

    def step(self) -> None:
        """Runs one step of every batch, and reports the new tokens to the jobs."""
        rows = self.running
        before = row_counts(rows)
        for queue in self._queues.values():
            if queue.engine.rows:
                self._step(queue.engine)
        self._metrics.wrote(*(b - a for a, b in zip(before, row_counts(rows), strict=True)))
        for row in rows:
            self._report(row)

    def recover(self, error: Exception) -> None:
        """Recovers from an error in an engine: fails the running rows, keeps the waiting rows."""
        failure = failure_of(error)
        waiting = [row for queue in self._queues.values() for row in queue.waiting]
        survivors = set(waiting)
        for row in [row for row in self._job_of if row not in survivors]:
            self._fail(row, failure)
        self._new_batches(waiting)
        mx.clear_cache()

    def _new_batches(self, waiting: Sequence[Row]) -> None:
        """Makes empty batches, and queues the waiting rows for them."""
        settings = replace(self._decoder.defaults, num_beams=1)
        engine = self._decoder.engine(settings, self._max_batch)
        assert not isinstance(engine, Beams), "one beam is no search"
        engine.on_verified = self._recorder = LogprobRecorder(self._alternatives)
        self._queues = {1: batching.Queue(engine, self._max_batch)}  # by number of beams
        self._enqueue(waiting)

    def _enqueue(self, rows: Iterable[Row]) -> None:
        for row in rows:
            beams = row.settings.num_beams
            if beams not in self._queues:
                batch = self._decoder.engine(row.settings, self._max_batch)
                self._queues[beams] = batching.Queue(batch, self._max_batch)
            self._queues[beams].waiting.append(row)

    def _alternatives(self, row: Row) -> int | None:
        return self._job_of[row].logprobs

    def _step(self, batch: Batch) -> None:
        began, rows = self._jobs.clock(), len(batch.rows)
        batch.step()
        for row, entries in self._recorder.collect():
            row.logprobs += entries
        proposals = max((choice.length for choice in batch.choices), default=0)
        self._metrics.stepped(rows, proposals, self._jobs.clock() - began)

    def _report(self, row: Row) -> None:
        """Reports a row's new text to its job: after each step for a stream, else at the end."""
        job, texts = self._job_of[row], texts_of(row) if row.finish_reason else [row]
        if error := next((text.error for text in texts if text.error), None):
            self._fail(row, ApiError(500, error))
            return
        if row.reported == 0 and row.stats.target_calls == 1:
            self._metrics.first_token_seconds.observe(self._jobs.clock() - job.place.submitted)
        if not (job.stream or row.finish_reason):
            return
        chunks = [self._decoder.codec.chunk(text) for text in texts]
        if row.finish_reason:
            self._metrics.finished(row.stats, row.finish_reason)
            seconds = row.stats.encode_seconds + row.stats.decode_seconds
            self._jobs.row_seconds += (seconds - self._jobs.row_seconds) / 8
            self._end(row)
        for chunk in chunks:  # last, so that the metrics have counted the text
            chunk.stats = copy.copy(chunk.stats)  # the row's stats keep changing
            self._jobs.put(job, chunk)

    def _fail(self, row: Row, failure: ApiError) -> None:
        """Fails a row. If the row is a piece of a document, only the piece fails.

        Otherwise the job fails too, and its other rows leave before the next step.
        """
        job = self._job_of[row]
        self._end(row)
        if job.document:
            row.fail(str(failure))
            row.reported = row.decided  # none of its text is reported
            self._jobs.put(job, self._decoder.codec.chunk(row))
            return
        self._jobs.cancel(job)
        self._jobs.put(job, failure)

    def _end(self, row: Row) -> None:
        """Removes a row, and frees places in the queue.

        An ordinary row frees its own places. A document keeps all places until its last row ends.
        """
        job = self._job_of.pop(row)
        if not job.document:
            self._jobs.release(job, row.settings.num_return_sequences)
        elif job in self._documents and job.place.whole and not self._has_unfinished_pieces(job):
            self._leave(job)


class LogprobRecorder:
    """Records the log-probabilities of the tokens of each step.

    The engine calls the recorder when it verifies proposals. Call `collect` after each step.
    """

    def __init__(self, alternatives: Callable[[Row], int | None]) -> None:
        """Makes a recorder.

        Args:
            alternatives: returns how many of the likeliest tokens to record for each token of a
                row; None if the row wants no log-probabilities.
        """
        self._alternatives = alternatives
        self._rows: list[tuple[Row, int, int]] = []  # row, alternatives, tokens decided before
        self._arrays: tuple[mx.array, ...] = ()

    def __call__(self, rows: Sequence[Row], logits: mx.array, tokens: mx.array) -> None:
        """Records log-probabilities of tokens (B rows, T positions); logits: (B, T, vocabulary)."""
        asking = [
            (i, n) for i, row in enumerate(rows) if (n := self._alternatives(row)) is not None
        ]
        self._rows = [(rows[i], n, rows[i].decided) for i, n in asking]
        if asking:
            indices, most = mx.array([i for i, _ in asking]), max(n for _, n in asking)
            self._arrays = likeliest_logprobs(logits[indices], tokens[indices], most)
            mx.async_eval(*self._arrays)

    def collect(self) -> list[tuple[Row, list[TokenLogprob]]]:
        """Returns each recorded row with the log-probabilities of its new tokens, EOS included."""
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


def likeliest_logprobs(
    logits: mx.array, tokens: mx.array, count: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns the log-probabilities of given tokens, and of the likeliest tokens.

    Args:
        logits: (R rows, T positions, V vocabulary) float32 logits.
        tokens: (R, T) int32 ids.
        count: K, the number of likeliest tokens to return; at most V.

    Returns:
        Three arrays: the log-probabilities of the tokens, (R, T) float32; the log-probabilities of
        the K likeliest tokens in descending order, (R, T, K) float32; and the ids of the likeliest
        tokens, (R, T, K).
    """
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    values = mx.take_along_axis(logits, tokens[..., None], axis=-1) - total
    ids = mx.argsort(-logits, axis=-1)[..., :count]
    top = mx.take_along_axis(logits, ids, axis=-1) - total
    return values[..., 0], top, ids
