"""Decodes generation jobs: makes rows, batches them, and reports their texts in chunks.

A row is one text in a batch, or one beam search. Rows join and leave a running batch between two
steps; rows with the same number of beams share one batch. Rows, chunks and results are made as for
`generate`.

A slot that becomes free goes to the waiting job that has the fewest rows in the batches, and among
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
from collections.abc import Callable, Iterator, Sequence

from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.beams import Beams
from mlx_t5.engine.looped_pieces import parts_to_decode
from mlx_t5.engine.reuse import AnswerStore
from mlx_t5.engine.rows import Row, TokenLogprob
from mlx_t5.engine.scheduler import Scheduler
from mlx_t5.sampling.beam_search import texts_of
from mlx_t5.serving.api_error import ApiError, failure_of
from mlx_t5.serving.metrics import Metrics, row_counts
from mlx_t5.serving.queue import GenerationJob, JobQueue


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
        self._job_of: dict[Row, GenerationJob] = {}  # the unfinished rows of the schedulers
        self._restart()

    def __bool__(self) -> bool:
        return bool(self._job_of or self._waiting)

    @property
    def running(self) -> list[Row]:
        return [row for one in list(self._schedulers.values()) for row in one.engine.rows]

    def add(self, job: GenerationJob) -> None:
        """Adds a job, whose rows join the batches one by one as slots become free."""
        self._advance(job, self._rows(job))

    def _advance(self, job: GenerationJob, rows: Iterator[Row]) -> None:
        row = next(rows, None)
        if row:
            self._waiting[job] = row, rows
        else:
            self._waiting.pop(job, None)

    def _rows(self, job: GenerationJob) -> Iterator[Row]:
        tokenizer, vocab_size = self._decoder.tokenizer, self._decoder.model.config.vocab_size
        index = 0
        try:
            for prompt in job.prompts:
                for row in job.request.rows(prompt, tokenizer, vocab_size):
                    row.index = index
                    index += row.settings.num_return_sequences
                    yield row
        except Exception as error:
            self._jobs.put(job, failure_of(error))
            self._jobs.cancel(job)

    def remove(self, job: GenerationJob) -> None:
        self._waiting.pop(job, None)
        rows = [row for row, owner in self._job_of.items() if owner is job]
        for row in rows:
            del self._job_of[row]
        for scheduler in self._schedulers.values():
            scheduler.remove(rows)

    def step(self) -> None:
        """Submits rows, runs one step of every batch, and reports the new tokens to the jobs."""
        self._submit_rows()
        for scheduler in self._schedulers.values():
            running = scheduler.engine.rows
            if not running:  # a request that is alone gets the same answer every time
                scheduler.engine.forget()
            before = row_counts(running)
            rows = scheduler.step()
            for row, entries in self._recorder.collect():
                row.logprobs += entries
            self._count_step(scheduler, before, [row for row in rows if row.stats.target_calls])
            for row in rows:
                self._report(row)

    def _count_step(self, scheduler: Scheduler, before: Counter[str], rows: list[Row]) -> None:
        """Updates the metrics after a step that advanced `rows`; `before` are their counts."""
        if not rows:
            return
        seconds, metrics = scheduler.step_seconds, self._metrics
        began = self._jobs.clock() - seconds
        for row in rows:
            if row.stats.target_calls == 1 and not row.whole:
                metrics.queue_seconds.observe(began - self._job_of[row].submitted)
        added = row_counts(rows) - before
        metrics.stepped(len(rows), scheduler.engine.gamma, seconds, added)

    def _submit_rows(self) -> None:
        """Submits rows while there are free slots, the next one of the job that has the fewest."""
        for job in list(self._waiting):  # a row whose text is known needs no slot
            while job in self._waiting and self._answers.has(self._waiting[job][0]):
                self._submit_next(job)
        rows_of = Counter(self._job_of.values())
        while self._waiting and self._has_free_slot():
            job = min(self._waiting, key=rows_of.__getitem__)
            rows_of[job] += 1
            self._submit_next(job)

    def _submit_next(self, job: GenerationJob) -> None:
        row, rows = self._waiting[job]
        self._job_of[row] = job
        self._advance(job, rows)
        self._scheduler_of(row).submit(row)
        if row.finish_reason:  # unusable, or its text is known
            self._report(row)

    def _has_free_slot(self) -> bool:
        taken = sum(len(s.engine.rows) + len(s.waiting) for s in self._schedulers.values())
        return taken < self._max_batch

    def recover(self, error: Exception) -> None:
        """Recovers from an error in an engine: fails the running rows, but no waiting rows."""
        waiting = [row for scheduler in self._schedulers.values() for row in scheduler.waiting]
        survivors = {*waiting, *self._answers.waiting}
        # A piece that waits for its parts fails with them.
        failed = [row for row in self._job_of if row not in survivors and not row.parts]
        for row in failed:
            self._fail(row, failure_of(error))
        self._restart()
        for row in [*self._answers.remove(failed), *waiting]:
            self._scheduler_of(row).waiting.append(row)
        mx.clear_cache()

    def _restart(self) -> None:
        self._schedulers: dict[int, Scheduler] = {}  # by number of beams
        self._recorder = LogprobRecorder(lambda row: self._job_of[row].request.logprobs)

    def _scheduler_of(self, row: Row) -> Scheduler:
        beams = row.settings.num_beams
        if beams not in self._schedulers:
            batch = self._decoder.engine(row.settings, self._max_batch)
            if not isinstance(batch, Beams):
                batch.on_verified = self._recorder
            answers = None if beams > 1 else self._answers
            self._schedulers[beams] = Scheduler(batch, self._max_batch, answers)
        return self._schedulers[beams]

    def _report(self, row: Row) -> None:
        """Reports a row's new text to its job: after each step for a stream, else at the end."""
        job = self._job_of[row]
        texts = texts_of(row) if row.finish_reason else [row]
        errors = [text.error for text in texts if text.error]
        if errors:
            # A row without tokens never joined a batch: its prompt is unusable or too long.
            self._fail(row, ApiError(500 if row.tokens else 400, errors[0]))
            return
        for part in (parts := parts_to_decode(row)):
            self._job_of[part] = job
            self._scheduler_of(part).submit(part)
        if parts:  # the last one to end reports the row
            for part in parts:
                if part.finish_reason:
                    self._report(part)
            return
        if row.reported == 0 and (row.stats.target_calls == 1 or row.stats.reused):
            self._metrics.first_token_seconds.observe(self._jobs.clock() - job.submitted)
        if not (job.request.stream or row.finish_reason):
            return
        chunks = [] if row.whole else [text.chunk() for text in texts]
        if row.finish_reason:
            self._metrics.finished(row.stats, row.finish_reason)
            self._end(row)
        for chunk in chunks:  # last, so that the metrics have counted the text
            chunk.stats = copy.copy(chunk.stats)  # the row's stats keep changing
            self._jobs.put(job, chunk)

    def _fail(self, row: Row, failure: ApiError) -> None:
        """Fails a row: a document continues, any other job is cancelled."""
        job = self._job_of[row]
        if job.of_pieces:
            row.fail(str(failure))
        self._end(row)
        if row.whole:
            return
        if job.of_pieces:
            row.reported = row.decided  # none of its text is reported
            for text in texts_of(row):
                self._jobs.put(job, text.chunk())
        else:
            self._jobs.cancel(job)
            self._jobs.put(job, failure)

    def _end(self, row: Row) -> None:
        job = self._job_of.pop(row)
        if not row.whole:
            self._jobs.release(job, row.settings.num_return_sequences)
        elif not any(part in self._job_of for part in row.whole.parts):
            self._report(row.whole)


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
