"""Checks requests and submits them to the thread that decodes.

Requests are checked in the event loop; their texts are tokenized in other threads.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from mlx_t5.checkpoints.generation_config import FILE, Preset, combined, find_task
from mlx_t5.checkpoints.pooling import Pooling
from mlx_t5.engine.codec import CHARACTERS
from mlx_t5.engine.rows import Result
from mlx_t5.errors import UserError
from mlx_t5.scoring.pairs import ranks_by
from mlx_t5.serving import api
from mlx_t5.serving.answers import EventStream, TokenSpelling
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.jobs import GenerationJob, Place, ScoringJob
from mlx_t5.serving.pieces import HANDED_IN, DocumentStream, Pieces, cut
from mlx_t5.serving.schemas import Capability, ServedModel
from mlx_t5.serving.tokenizing import RequestLimits, TokenizerThread
from mlx_t5.settings import SETTINGS, Settings, check_exact
from mlx_t5.text.documents import Cutting

if TYPE_CHECKING:
    from mlx_t5.serving.worker import Worker

log = logging.getLogger(__name__)

PASSES_A_TEXT = 16  # this many full batches to score or embed count as one text in the queue
OF_BEAMS = [name for name, s in SETTINGS.items() if s.only_with == "beams" and s.request]
NO_TASK = Preset("no task")


@dataclass(frozen=True)
class Presets:
    """The defaults and the tasks that the model's own files define.

    Attributes:
        general: the default settings of every request.
        tasks: by name, the prefix and the settings of each task that a request may choose.
    """

    general: Preset = Preset(FILE)
    tasks: Mapping[str, Preset] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Lines to print about entries of the model's files that are not supported."""
        names = dict.fromkeys(name for task in self.tasks.values() for name in task.left_out)
        tasks = Preset("tasks", left_out=tuple(names))
        return [preset.note for preset in (self.general, tasks) if preset.left_out]


class Service:
    """Checks requests, and submits them to the worker's thread."""

    def __init__(
        self,
        worker: Worker,
        limits: RequestLimits,
        model: str,
        delta: float,
        log_prompts: bool = False,
        presets: Presets | None = None,
    ):
        """Starts the worker, which loads the models.

        Args:
            worker: the worker, not started yet.
            limits: limits on requests.
            model: the name under which clients know the model.
            delta: the default `delta` (leniency) of requests.
            log_prompts: whether to log prompts and texts.
            presets: defaults and tasks from the model's own files.

        Raises:
            UserError: the models cannot be loaded, there is no tokenizer, or exact decoding does
                not support the default settings.
        """
        decoder = worker.start()
        self.worker, self.limits, self.model = worker, limits, model
        self.presets, self._base_settings = presets or Presets(), decoder.defaults
        self._default_settings = combined({"delta": delta}, self.presets.general.settings)
        self.defaults = replace(self._base_settings, **self._default_settings)
        self.drafts, self.exact = decoder.drafter is not None, decoder.exact
        width = decoder.target(worker.max_batch).width if self.exact else api.MAX_NUM_DRAFT + 1
        self.max_num_draft = min(api.MAX_NUM_DRAFT, width - 1)
        try:
            if decoder.tokenizer is None:
                message = "the target's folder has no tokenizer, which a server needs: fetch it"
                raise UserError(message)
            self._check(self.defaults)
        except UserError:
            worker.stop()
            raise
        self.log_prompts, self.created = log_prompts, int(time.time())
        self._dtype = str(decoder.model.dtype).removeprefix("mlx.core.")
        config, most = decoder.model.config, limits.prompt_tokens
        facts = decoder.tokenizer, config.vocab_size, limits
        self.tokenizer, self.documents = TokenizerThread(*facts), TokenizerThread(*facts)
        self.max_source_tokens = min(config.n_positions or most, most)
        self.prefixes = config.task_prefixes
        self.pooling: Pooling = decoder.model.pooling
        self._can_decode = decoder.model.can_decode
        self.spell = TokenSpelling(self.tokenizer.tokenizer)

    @property
    def capabilities(self) -> list[Capability]:
        """The endpoints that the model serves, named by the last part of their address."""
        if not self._can_decode:
            return ["embeddings"]
        ranks: list[Capability] = ["rerank"] if ranks_by(self.tokenizer.tokenizer) else []
        return ["completions", "score", *ranks, "embeddings"]

    def log_texts(self, results: Sequence[Result]) -> None:
        """Logs the texts of these results, if the server logs prompts and texts."""
        if self.log_prompts:
            log.info("texts: %r", [result.text for result in results])

    async def cut(self, body: api.TextRequest) -> Pieces:
        """Prepares to split a request's text, and returns its pieces, which are cut lazily.

        The prompt of each piece begins with the task's prefix and the system message.

        Raises:
            ApiError: the prompt is not one text or cannot be cut, or the request has a field that
                a split text does not support.
        """
        *system, text = body.parts
        fields = {"n": (body.n or 1) > 1, "logprobs": body.alternatives is not None}
        fields |= {"prediction": bool(body.prediction), "prompt": not isinstance(text, str)}
        for name, refused in fields.items():
            if refused:
                message = f"{name}: a text that is split is one prompt, as text, and has one answer"
                raise ApiError(400, f"{message} without logprobs or prediction", name)
        prefix = self.task(body.task, []).prefix
        prefix += "".join(part.strip() + " " for part in system).lstrip()
        cutting = Cutting(
            body.split or "none",
            prefix or None,
            body.source_language or "",
            file_type=body.file_type or "",
        )
        limits = self.max_source_tokens, self.prefixes
        return await cut(self.documents, text, cutting, *limits, bool(body.speculation))

    async def submit(
        self, body: api.PredictRequest | api.TextRequest, receive: Callable[[], Any]
    ) -> EventStream[GenerationJob]:
        """Checks a request, submits it to the worker, and returns the stream of its events.

        Args:
            body: the request.
            receive: the connection's ASGI `receive`, to notice when the client disconnects.

        Raises:
            ApiError: the request is not valid, or the queue is full or closed.
        """
        self._require_decoder()
        kind: dict[str, Any] = {}
        samples, pieces, prompts = 1, None, body.prompts
        if not isinstance(body, api.PredictRequest):
            samples, kind["by_token"] = body.n or 1, bool(body.speculation)
            if body.split in (None, "none"):
                kind |= {"stream": bool(body.stream), "logprobs": body.alternatives}
            else:
                pieces = await self.cut(body)
        task = self.task(body.task, prompts)
        settings = several(self._settings(body, task), body, samples, **kind)
        size = len(prompts) * samples
        if pieces:  # rows of the document at a time
            size = min(pieces.count, self.worker.max_batch, self.limits.rows)
        if size > self.limits.rows:
            most = f"more than one request may ask for here ({self.limits.rows})"
            raise ApiError(400, f"{size} texts are {most}; send several", "n")
        ids = await self.tokenizer.token_ids([] if pieces else prompts, prefix=task.prefix)
        longest = settings.max_tokens * CHARACTERS
        predictions = [body.prediction.text[:longest]] if body.prediction else []
        kind["predictions"] = await self.tokenizer.token_ids(predictions, "prediction")
        seed = secrets.randbelow(2**53) if body.seed is None else body.seed
        if self.log_prompts:
            log.info("prompts: %r", list(prompts))
        kind |= {"prompts": ids, "document": bool(pieces), "place": Place(size)}
        job = GenerationJob(settings, seed, samples // settings.num_return_sequences, **kind)
        if pieces:
            first = await self.documents.run(lambda _: pieces.draw(HANDED_IN * size))
            return DocumentStream(pieces, first, self.documents, job, self.worker.jobs, receive)
        return EventStream(job, self.worker.jobs, receive)

    async def score_or_embed(self, job: ScoringJob, receive: Callable[[], Any]) -> list[Any]:
        """Submits a job that scores or embeds, and returns its scores or vectors.

        Args:
            job: the job; this method sets its size.
            receive: the connection's ASGI `receive`, to notice when the client disconnects.

        Raises:
            ApiError: the model cannot score, the queue is full or closed, or the job fails.
        """
        if job.kind != "embed":
            self._require_decoder()
        # Limited, so that even the largest request fits into a small, empty queue.
        batches = math.ceil(job.count / self.worker.max_batch / PASSES_A_TEXT)
        job.place.size = min(batches, self.limits.rows)
        return await EventStream(job, self.worker.jobs, receive).next()

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` if a request names a model that is not the served one."""
        if name not in (None, self.model):
            message = f"there is no such model here; the one that is served is {self.model}"
            raise ApiError(404, message, "model", "model_not_found")

    def _require_decoder(self) -> None:
        if not self._can_decode:
            message = f"{self.model} is an encoder alone and writes no text; ask for embeddings"
            raise ApiError(400, message, "model")

    def task(self, name: str | None, prompts: Sequence[str | Sequence[int]]) -> Preset:
        """Returns the preset (prefix and settings) of a task; an empty preset if `name` is None.

        Raises:
            ApiError: the task does not exist, or has a prefix although a prompt is token ids.
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
        requested = body.settings
        if requested.get("max_tokens", 0) > self.limits.max_tokens:
            most = f"at most {self.limits.max_tokens} here"
            raise ApiError(400, f"max_tokens: {most}; the server's --max-tokens", "max_tokens")
        if (body.draft or requested.get("num_draft")) and not (self.drafts or body.prediction):
            raise ApiError(400, "this server has no draft; leave draft and num_draft out", "draft")
        values = combined(self._default_settings, task.settings, requested)
        max_tokens = values.get("max_tokens", self._base_settings.max_tokens)
        values["max_tokens"] = min(max_tokens, self.limits.max_tokens)
        settings = replace(self._base_settings, **values)
        try:
            self._check(settings)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return settings

    def _check(self, settings: Settings) -> None:
        """Raises `UserError` if decoding is exact and does not support the settings."""
        if self.exact:
            check_exact(settings, self.max_num_draft + 1)

    def describe(self) -> ServedModel:
        """Returns a description of the model, with its limits and defaults."""
        tasks = self.presets.tasks.items()
        return ServedModel(
            id=self.model,
            object="model",
            created=self.created,
            owned_by="local",
            capabilities=self.capabilities,
            max_prompt_tokens=self.limits.prompt_tokens,
            max_tokens=self.limits.max_tokens,
            num_draft=cast(Any, self.defaults.num_draft),
            max_num_draft=self.max_num_draft,
            delta=self.defaults.delta,
            num_beams=self.defaults.num_beams,
            max_num_beams=api.MAX_BEAMS,
            length_penalty=self.defaults.length_penalty,
            draft=self.drafts,
            tasks={name: {"prefix": task.prefix, **task.settings} for name, task in tasks},
            dtype=self._dtype,
            exact=self.exact,
        )


def several(
    settings: Settings,
    body: api.Decoding,
    samples: int,
    stream: bool = False,
    logprobs: int | None = None,
    **_: Any,
) -> Settings:
    """Returns the settings that produce `samples` texts per prompt, by beam search or sampling.

    Args:
        settings: the settings, combined from the request, its task and the server.
        body: the request.
        samples: number of texts per prompt.
        stream: whether the answer is streamed.
        logprobs: number of likeliest tokens to report with each token; None for no
            log-probabilities.

    Raises:
        ApiError: the settings do not allow several texts, streaming or log-probabilities.
    """
    beams, search = f"num_beams is {settings.num_beams}", settings.num_beams > 1
    if search:
        refusals = [
            ("stream", stream, f"{beams}: a text is known at its end; leave stream out"),
            ("logprobs", logprobs is not None, f"{beams}: beams have none; leave them out"),
            ("n", samples > settings.num_beams, f"n is {samples} and {beams}; n is too many"),
        ]
    else:
        greedy = f"n is {samples}, but greedy texts would be equal; set temperature above 0"
        has_beam_settings = not body.settings.keys().isdisjoint(OF_BEAMS)
        refusals = [
            ("n", samples > 1 and settings.temp == 0, greedy),
            ("num_beams", has_beam_settings, f"{' and '.join(OF_BEAMS)} need num_beams above 1"),
        ]
    for param, refused, message in refusals:
        if refused:
            raise ApiError(400, message, param)
    return replace(settings, num_return_sequences=samples) if search else settings
