"""From a request to the thread that decodes it, and its events back to whoever waits for them.

Everything here runs in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.checkpoints.generation_config import Preset, combined, find_task
from mlx_t5.engine.batching import MAX_JOINING_TOKENS
from mlx_t5.errors import UserError
from mlx_t5.pooling import Pooling
from mlx_t5.scoring.pairs import Pair, Score, ranks_by
from mlx_t5.serving import api
from mlx_t5.serving.errors import ApiError
from mlx_t5.serving.jobs import Exchange, Job, Pairs, PassJob, Prompts, QueueFull, Stopped
from mlx_t5.serving.presets import Presets, several
from mlx_t5.serving.reading import Reader, RequestLimits
from mlx_t5.serving.spelling import Speller
from mlx_t5.settings import Settings, check_exact

if TYPE_CHECKING:
    from mlx_t5.serving.worker import Worker

log = logging.getLogger(__name__)

PASSES_A_TEXT = 16  # full passes of scores or embeddings that count as one text in the queue
NO_TASK = Preset("no task")


class Service:
    """The models and the thread, as far as requests need them."""

    def __init__(
        self,
        worker: Worker,
        limits: RequestLimits,
        model: str,
        delta: float,
        log_prompts: bool = False,
        presets: Presets | None = None,
    ):
        """Serves what a started worker has loaded.

        Args:
            worker: not started yet.
            limits: on requests.
            model: name that clients know the target by.
            delta: where a request names none.
            log_prompts: whether prompts and texts are logged.
            presets: the model's own wishes.

        Raises:
            UserError: the models cannot be loaded, or there is no tokenizer.
        """
        decoder = worker.start()
        if decoder.tokenizer is None:
            worker.stop()
            raise UserError("the target's folder has no tokenizer, which a server needs: fetch it")
        self.worker, self.limits, self.model = worker, limits, model
        self.presets, self._unset = presets or Presets(), decoder.defaults
        self._usual = combined({"delta": delta}, self.presets.general.settings)
        self.defaults = replace(self._unset, **self._usual)
        self.drafts, self.exact = decoder.drafter is not None, decoder.exact
        width = decoder.target(worker.max_batch).width if self.exact else api.MAX_NUM_DRAFT + 1
        self.max_num_draft = min(api.MAX_NUM_DRAFT, width - 1)
        try:
            self._check(self.defaults)
        except UserError:
            worker.stop()
            raise
        self.log_prompts, self.created = log_prompts, int(time.time())
        self._dtype = str(decoder.model.dtype).removeprefix("mlx.core.")
        self.reader = Reader(decoder.tokenizer, decoder.model.config.vocab_size, limits)
        self.pooling: Pooling = decoder.model.pooling
        self._can_decode = decoder.model.can_decode
        self.spell = Speller(self.reader.tokenizer)
        self._watching: set[asyncio.Task] = set()

    @property
    def capabilities(self) -> list[str]:
        """What the model can do: the last parts of the addresses that it serves."""
        writes = ["completions", "score"] if self._can_decode else []
        ranks = ["rerank"] if self._can_decode and ranks_by(self.reader.tokenizer) else []
        return [*writes, *ranks, "embeddings"]

    def log_texts(self, texts: Sequence[str]) -> None:
        """Logs what was written, if that was asked for."""
        if self.log_prompts:
            log.info("texts: %r", list(texts))

    async def submit(
        self,
        body: api.Decoding,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        receive: Callable[[], Any],
        **wishes: Any,
    ) -> Exchange:
        """Checks a request and hands it to the thread.

        Args:
            body: how to decode.
            prompts: texts or token ids.
            receive: the connection's, to see the client go.
            **wishes: further attributes of the job.

        Raises:
            ApiError: it cannot be done, or not now.
        """
        self._require_decoder()
        task = self.task(body.task, prompts)
        settings = several(self._settings(body, task), body, **wishes)
        size = len(prompts) * wishes.get("samples", 1)
        if size > self.limits.rows:
            raise ApiError(
                400,
                f"{size} texts are more than one request may ask for here "
                f"({self.limits.rows}); send several",
                "n",
            )
        ids = await self.reader.all_token_ids(prompts, prefix=task.prefix)
        seed = secrets.randbelow(2**53) if body.seed is None else body.seed
        exchange = Exchange(self.worker.cancel)
        job = exchange.job = Job(ids, settings, seed, exchange.put, **wishes)
        if self.log_prompts:
            log.info("prompts: %r", list(prompts))
        self._hand_in(job)
        self._watch(exchange, receive)
        return exchange

    async def embed(
        self, ids: Sequence[Sequence[int]], normalize: bool, receive: Callable[[], Any]
    ) -> list[np.ndarray]:
        """Vectors of prompts, as token ids; arguments and errors as of `submit`."""
        parts = Prompts(ids, normalize, self.worker.max_batch, MAX_JOINING_TOKENS)
        return await self._run("embed", parts, len(ids), sum(map(len, ids)), receive)

    async def score(
        self, kind: str, pairs: Sequence[Pair], receive: Callable[[], Any]
    ) -> list[Score]:
        """Scores of pairs; `kind` is for the metrics, the rest as of `submit`."""
        self._require_decoder()
        parts = Pairs(pairs, self.worker.max_batch, MAX_JOINING_TOKENS)
        tokens = sum(map(len, {pair.source for pair in pairs}))
        return await self._run(kind, parts, len(pairs), tokens, receive)

    async def _run(
        self,
        kind: str,
        parts: Pairs | Prompts,
        count: int,
        tokens: int,
        receive: Callable[[], Any],
    ) -> list[Any]:
        """Hands a task to the thread and waits for its values."""
        # However small the queue is, the largest request finds room in it when nothing waits.
        size = min(math.ceil(count / self.worker.max_batch / PASSES_A_TEXT), self.limits.rows)
        exchange = Exchange(self.worker.cancel)
        exchange.job = PassJob(kind, parts, count, tokens, size, exchange.put)
        self._hand_in(exchange.job)
        self._watch(exchange, receive)
        return (await exchange.next()).values

    def _watch(self, exchange: Exchange, receive: Callable[[], Any]) -> None:
        task = asyncio.create_task(exchange.watch(receive))
        self._watching.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._watching.discard)

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` if a request names another model than the one that is served."""
        if name not in (None, self.model):
            message = f"there is no such model here; the one that is served is {self.model}"
            raise ApiError(404, message, "model", "model_not_found")

    def _require_decoder(self) -> None:
        if not self._can_decode:
            message = f"{self.model} is an encoder alone and writes no text; ask for embeddings"
            raise ApiError(400, message, "model")

    def _hand_in(self, job: Job | PassJob) -> None:
        try:
            self.worker.submit(job)
        except QueueFull as error:
            headers = {"Retry-After": str(error.retry_after)}
            raise ApiError(429, str(error), code="queue_full", headers=headers) from None
        except Stopped as error:
            raise ApiError(503, str(error)) from None

    def task(self, name: str | None, prompts: Sequence[str | Sequence[int]]) -> Preset:
        """The task that a request names; one that wants nothing where it names none.

        Raises:
            ApiError: there is no such task, or it has a prefix and a prompt is token ids.
        """
        if name is None:
            return NO_TASK
        try:
            task = find_task(self.presets.tasks, name)
        except UserError as error:
            raise ApiError(400, str(error), "task") from None
        if task.prefix and not all(isinstance(prompt, str) for prompt in prompts):
            raise ApiError(400, "task puts a text before the prompt; send that as text", "task")
        return task

    def _settings(self, body: api.Decoding, task: Preset = NO_TASK) -> Settings:
        given = body.given
        if given.get("max_tokens", 0) > self.limits.max_tokens:
            message = (
                f"max_tokens: at most {self.limits.max_tokens} here; the server's --max-tokens"
            )
            raise ApiError(400, message, "max_tokens")
        if (body.draft or given.get("num_draft")) and not self.drafts:
            raise ApiError(400, "this server has no draft; leave draft and num_draft out", "draft")
        wishes = combined(self._usual, task.settings, given)
        longest = wishes.get("max_tokens", self._unset.max_tokens)
        wishes["max_tokens"] = min(longest, self.limits.max_tokens)
        settings = replace(self._unset, **wishes)
        try:
            self._check(settings)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return settings

    def _check(self, settings: Settings) -> None:
        """Refuses what exact decoding cannot do."""
        if self.exact:
            check_exact(settings, self.max_num_draft + 1)

    def describe(self) -> dict[str, Any]:
        """What a client may want to know before it asks."""
        tasks = self.presets.tasks.items()
        return {
            "capabilities": self.capabilities,
            "max_prompt_tokens": self.limits.prompt_tokens,
            "max_tokens": self.limits.max_tokens,
            "num_draft": self.defaults.num_draft,
            "max_num_draft": self.max_num_draft,
            "delta": self.defaults.delta,
            "num_beams": self.defaults.num_beams,
            "max_num_beams": api.MAX_BEAMS,
            "length_penalty": self.defaults.length_penalty,
            "draft": self.drafts,
            "tasks": {name: {"prefix": task.prefix, **task.settings} for name, task in tasks},
            "dtype": self._dtype,
            "exact": self.exact,
        }
