"""Checks requests and submits them to the thread that decodes.

The event loop checks requests; other threads tokenize their texts and cut documents.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any

from mlx_t5.checkpoints.generation_config import Preset, combined, find_task
from mlx_t5.checkpoints.pooling import Pooling
from mlx_t5.engine.document_results import DocumentInFlight, fitted_document
from mlx_t5.engine.generation_request import CHARACTERS, GenerationRequest
from mlx_t5.engine.rows import Result
from mlx_t5.errors import UserError, brief
from mlx_t5.scoring.pairs import FALSE, RERANK_TOKENS, TRUE, Pair, ranks_by, relevance_pairs
from mlx_t5.serving import requests
from mlx_t5.serving.api_error import ApiError, refusing
from mlx_t5.serving.builders import TokenDecoder
from mlx_t5.serving.limits import RequestLimits
from mlx_t5.serving.presets import Presets
from mlx_t5.serving.queue import GenerationJob, Receive, ScoringJob, events, last_chunks
from mlx_t5.serving.responses import Capability, ServedModel
from mlx_t5.serving.saved_prompts import SavedPrompts
from mlx_t5.serving.worker import Worker
from mlx_t5.settings import AUTO, Settings, check_exact
from mlx_t5.text.languages import Translations
from mlx_t5.text.prompts import DocumentOptions, Prompt, token_ids

log = logging.getLogger(__name__)

Body = requests.PredictRequest | requests.TextRequest
MAX_PIECES = 5_000  # of a document
LONG = 20_000  # characters of texts that are cut one request at a time
BATCHES_PER_TEXT = 16  # this many full batches to score or embed count as one text in the queue
NO_TASK = Preset("no task")
NAMES = {"input": "text", "targets": "target", "messages": "prompt"}  # of fields, in messages


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
        saved: SavedPrompts | None = None,
    ):
        """Waits until the worker has loaded the models.

        Args:
            worker: the worker, which may be loading already.
            limits: limits on requests.
            model: the name under which clients know the model.
            delta: the default `delta` (leniency) of requests.
            log_prompts: whether to log prompts and texts.
            presets: defaults and tasks from the model's own files.
            saved: where to save the prompts of valid requests.

        Raises:
            UserError: the models cannot be loaded, there is no tokenizer, or exact decoding does
                not support the default settings, or the template for translations is not valid.
        """
        decoder = worker.start()
        self.worker, self.limits, self.model = worker, limits, model
        self.created = int(time.time())
        self.presets = presets or Presets()
        self.saved = saved
        self._logs_prompts = log_prompts
        self._base_settings = decoder.defaults
        self._default_settings = combined({"delta": delta}, self.presets.general.settings)
        self.defaults = replace(self._base_settings, **self._default_settings)
        self.drafts = decoder.draft is not None or decoder.copy is not None
        self.exact = decoder.exact
        self.max_num_draft = requests.MAX_NUM_DRAFT
        if self.exact:
            width = decoder.target(worker.max_batch).width
            self.max_num_draft = min(self.max_num_draft, width - 1)
        try:
            if decoder.tokenizer is None:
                message = "the target's folder has no tokenizer, which a server needs: fetch it"
                raise UserError(message)
            if self.exact:
                check_exact(self.defaults, self.max_num_draft + 1)
            config, vocabulary = decoder.model.config, decoder.tokenizer.get_vocab()
            template = self.presets.translation_prefix or config.translation_prefix
            self.translations = Translations.of(config.tasks, vocabulary, template)
        except UserError:
            worker.stop()
            raise
        self._model, self._config = decoder.model, decoder.model.config
        self.tokenizer = copy.deepcopy(decoder.tokenizer)  # the worker's thread uses the original
        self._longest = max(map(len, self.tokenizer.get_vocab()))  # characters of a token
        self._cutting = asyncio.Lock()  # for long texts, so that short ones find a thread
        most = limits.prompt_tokens
        self._max_source_tokens = min(self._config.n_positions or most, most)
        self.token_decoder = TokenDecoder(self.tokenizer)
        self.rerank_words = self.presets.rerank_words or (TRUE, FALSE)

    @property
    def capabilities(self) -> list[Capability]:
        """The endpoints that the model serves, named by the last part of their address."""
        if not self._model.can_decode:
            return ["embeddings"]
        ranks: list[Capability] = ["rerank"] if ranks_by(self.tokenizer, self.rerank_words) else []
        return ["completions", "score", *ranks, "embeddings"]

    def log_texts(self, what: str, texts: Sequence[Any]) -> None:
        if self._logs_prompts:
            log.info("%s: %r", what, list(texts))

    def decoded(self, job: GenerationJob, results: Sequence[Result]) -> None:
        """Logs the texts of a job, and saves its prompts, if the server's options say so."""
        self.log_texts("texts", [result.text for result in results])
        if self.saved:
            self.saved.add(job.sources)

    async def results(self, job: GenerationJob, receive: Receive) -> list[Result]:
        """Submits a job and waits for its results, in the order of its texts."""
        chunks = await last_chunks(events(job, self.worker.jobs, receive))
        results = [chunk.result for chunk in chunks]
        self.decoded(job, results)
        return results

    async def token_ids(
        self, texts: Sequence[str | Sequence[int]], param: str = "prompt", prefix: str = ""
    ) -> list[list[int]]:
        """The tokens of each text; if a text is clearly too long, no text is tokenized.

        Args:
            texts: texts or lists of token ids. The ids are only checked.
            param: the request's field, for errors. The limit is `max_tokens` for "targets", and
                `prompt_tokens` for all other fields. For "input", the model's `Pooling` applies:
                its prompt is put before each text, and tokens beyond its limit are cut off.
            prefix: a task's prefix, put before every text.

        Raises:
            ApiError: a text is empty, too long or not valid, or an id is not in the vocabulary.
        """
        by_field: dict[str, Any] = {}
        for i, text in enumerate(texts):
            name = f"{param}[{i}]" if len(texts) > 1 else param
            by_field[name] = prefix + text if isinstance(text, str) else text
            self._check_length(by_field[name], name)
        pooling: Pooling | None = self._model.pooling if param == "input" else None

        def tokenize(name: str, text: Any) -> list[int]:
            pools = pooling is not None and isinstance(text, str) and text.strip()
            if pooling and pools:
                text = pooling.prompt + text
            with refusing(name):
                what = NAMES.get(param, param)
                ids = token_ids(text, self.tokenizer, self._config.vocab_size, what)
            if pooling and pools:
                ids = pooling.cut(ids)
            self._check_length(ids, name)
            return ids

        return await asyncio.to_thread(lambda: [tokenize(*one) for one in by_field.items()])

    def _check_length(self, text: str | Sequence[int], param: str) -> None:
        """Refuses too many token ids, and a text that is too long for the tokens allowed."""
        name = param.split("[")[0]
        most, option = self.limits.prompt_tokens, "--max-prompt-tokens"
        if name == "targets":
            most, option = self.limits.max_tokens, "--max-tokens"
        longest, count = most, str(len(text))
        if isinstance(text, str):  # the number of its tokens is not known
            longest, count = most * self._longest, "more"
        if len(text) > longest:
            limit = f"at most {most} are taken here (the server's {option}); shorten it"
            message = f"the {NAMES.get(name, name)} has {count} tokens; {limit}"
            raise ApiError(400, message, param, "context_length_exceeded")

    async def _cut(self, body: requests.TextRequest) -> DocumentInFlight:
        """Cuts a request's text; every prompt begins with the task's prefix and the system message.

        Raises:
            ApiError: the prompt is not one text, cannot be cut or has too many pieces, or the
                request has a field that a split text does not support.
        """
        *system, text = body.parts
        fields = {
            "n": (body.n or 1) > 1,
            "logprobs": body.alternatives is not None,
            "prediction": body.prediction is not None,
            "prompt": not isinstance(text, str),
        }
        for name, refused in fields.items():
            if refused:
                message = f"{name}: a text that is split is one prompt, as text, and has one answer"
                raise ApiError(400, f"{message} without logprobs or prediction", name)
        prefix, source = self._prefix(body)
        prefix += "".join(part.strip() + " " for part in system).lstrip()
        language, file_type = source or body.source_language or "", body.file_type or ""
        with refusing("source_language"):
            options = DocumentOptions(body.unit, prefix or None, language, file_type=file_type)
        (document,) = await self.documents([text], options, body.text_field)
        return document

    async def documents(
        self, texts: Sequence[str], options: DocumentOptions, param: str
    ) -> list[DocumentInFlight]:
        """Cuts texts; refuses more than `MAX_PIECES` together, and a text that cannot be cut."""

        def cut() -> list[DocumentInFlight]:
            documents, left = list[DocumentInFlight](), MAX_PIECES + 1
            limits = self._max_source_tokens, self._config.task_prefixes
            for index, text in enumerate(texts):
                document = fitted_document(text, options, self.tokenizer, *limits)
                if document.doubtful:
                    log.info("a text may begin with a prefix; if so, send task or system message")
                documents.append(DocumentInFlight(document, Prompt(text, index), left))
                left -= len(documents[-1].prompts)
                if left <= 0:
                    message = f"there are more than {MAX_PIECES} pieces to decode"
                    message += "; send them in parts"
                    raise ApiError(400, message, param, "context_length_exceeded")
            return documents

        # A text of a few characters takes as long as 100 characters of a long one.
        is_long = sum(len(text) + 100 for text in texts) > LONG
        with refusing(param):
            async with self._cutting if is_long else nullcontext():
                return await asyncio.to_thread(cut)

    def _prefix(self, body: Body) -> tuple[str, str]:
        """The prefix of a request's task or languages, and the code of the source language."""
        if body.target_language is None:
            return self.task(body.task, []).prefix, ""
        self._require_texts(body.prompts, "target_language")
        with refusing("target_language"):
            return self.translations.prefix(body.target_language, body.source_language or "")

    async def generation_job(self, body: Body) -> GenerationJob:
        """Checks a request, and makes its job; raises `ApiError` if the request is not valid."""
        self.require_decoder()
        task = self.task(body.task, body.prompts)
        language = body.target_language or ""
        settings, samples = self._settings(body, task, bool(language)), body.n or 1
        if settings.num_beams > 1:
            settings = replace(settings, num_return_sequences=samples)
        elif samples > 1 and settings.temp == 0:
            message = f"n is {samples}, but greedy texts would be equal; set temperature above 0"
            raise ApiError(400, message, "n")
        self.log_texts("prompts", body.prompts)
        document = None
        if body.unit != "none":
            document = await self._cut(body)
            prompts = document.prompts
            sources = [str(prompt.source) for prompt in prompts]
        else:
            texts = len(body.prompts) * samples
            if texts > self.limits.rows:
                most = f"more than one request may ask for here ({self.limits.rows})"
                raise ApiError(400, f"{texts} texts are {most}; send several", "n")
            prefix, _ = self._prefix(body)
            prompts = await self._prompts(body, prefix, settings)
            sources = [prefix + text for text in body.prompts if isinstance(text, str)]
        request = GenerationRequest(
            settings,
            seed=secrets.randbelow(2**53) if body.seed is None else body.seed,
            num_samples=samples // settings.num_return_sequences,
            document=DocumentOptions(target_language=language),
            stream=bool(body.stream) and document is None,
            by_token=bool(body.speculation),
            logprobs=body.alternatives,
        )
        return GenerationJob(
            texts=len(prompts) * samples,
            request=request,
            prompts=prompts,
            of_pieces=document is not None,
            document=document,
            sources=sources,
        )

    async def _prompts(self, body: Body, prefix: str, settings: Settings) -> list[Prompt]:
        """The prompts of a request that splits no text, as token ids."""
        ids = await self.token_ids(body.prompts, body.text_field, prefix)
        if not body.prediction:
            return [Prompt(one, index) for index, one in enumerate(ids)]
        expected = body.prediction.text[: settings.max_tokens * CHARACTERS]
        (predicted,) = await self.token_ids([expected], "prediction")
        return [Prompt(ids[0], prediction=predicted)]  # a prediction belongs to a single prompt

    async def pairs_to_rank(
        self, query: str, documents: Sequence[str], words: Sequence[str], most_tokens: int | None
    ) -> list[Pair]:
        """Two pairs per document, one for each of the words; the prompts of long ones are cut.

        `most_tokens` is the maximum number of tokens of a document.
        """
        if not ranks_by(self.tokenizer, words):
            cause = f"{self.model} cannot rank by {' and '.join(map(brief, words))}"
            raise ApiError(400, f"{cause}; name two words that are single tokens", "words")
        self._check_length(query, "query")
        if not query.strip():
            raise ApiError(400, "the query is empty; write what is looked for", "query")
        most = self.limits.prompt_tokens

        def pairs() -> list[Pair]:
            texts = [document[: most * self._longest] for document in documents]
            facts = self.tokenizer, self._config.vocab_size, words, min(most, RERANK_TOKENS)
            return list(relevance_pairs(query, texts, *facts, most_tokens))

        with refusing("documents"):
            return await asyncio.to_thread(pairs)

    async def score_or_embed(self, job: ScoringJob, receive: Receive) -> list[Any]:
        """Submits a job that scores or embeds, and waits for its scores or vectors.

        Raises:
            ApiError: the model cannot score, the queue is full or closed, or the job fails.
        """
        if job.kind != "embed":
            self.require_decoder()
        # Limited, so that even the largest request fits into a small, empty queue.
        batches = math.ceil(job.count / self.worker.max_batch / BATCHES_PER_TEXT)
        job.texts = min(batches, self.limits.rows)
        async with aclosing(events(job, self.worker.jobs, receive)) as values:
            return await anext(values)

    def require_decoder(self) -> None:
        if not self._model.can_decode:
            message = f"{self.model} is an encoder alone and writes no text; ask for embeddings"
            raise ApiError(400, message, "model")

    def task(self, name: str | None, prompts: Sequence[str | Sequence[int]]) -> Preset:
        """The prefix and settings of a task, none if `name` is None.

        Raises:
            ApiError: the task does not exist, or has a prefix although a prompt is token ids.
        """
        if name is None:
            return NO_TASK
        with refusing("task"):
            task = find_task(self.presets.tasks, name)
        if task.prefix:
            self._require_texts(prompts, "task")
        return task

    def _require_texts(self, prompts: Sequence[Any], param: str) -> None:
        if not all(isinstance(prompt, str) for prompt in prompts):
            message = f"{param} puts a text before the prompt; send that as text"
            raise ApiError(400, message, param)

    def _settings(
        self, body: requests.Decoding, task: Preset = NO_TASK, translates: bool = False
    ) -> Settings:
        requested = body.settings
        if requested.get("max_tokens", 0) > self.limits.max_tokens:
            most = f"at most {self.limits.max_tokens} here"
            raise ApiError(400, f"max_tokens: {most}; the server's --max-tokens", "max_tokens")
        wants_draft = body.draft or requested.get("num_draft") not in (None, 0, AUTO)
        if wants_draft and not (self.drafts or body.prediction):
            raise ApiError(400, "this server has no draft; leave draft and num_draft out", "draft")
        return self.settings(task.settings, requested, translates=translates)

    def settings(self, *sources: Mapping[str, Any], translates: bool = False) -> Settings:
        """The server's default settings with those of the sources; later ones win."""
        defaults = Settings.TRANSLATING if translates else {}
        values = combined(defaults, self._default_settings, *sources)
        max_tokens = values.get("max_tokens", self._base_settings.max_tokens)
        values["max_tokens"] = min(max_tokens, self.limits.max_tokens)
        settings = replace(self._base_settings, **values)
        if self.exact:
            with refusing():
                check_exact(settings, self.max_num_draft + 1)
        return settings

    def describe(self) -> ServedModel:
        tasks, names = self.presets.tasks.items(), ("num_draft", "delta", "num_beams")
        defaults: Any = {n: getattr(self.defaults, n) for n in (*names, "length_penalty")}
        return ServedModel(
            id=self.model,
            created=self.created,
            capabilities=self.capabilities,
            max_prompt_tokens=self.limits.prompt_tokens,
            max_tokens=self.limits.max_tokens,
            **defaults,
            max_num_draft=self.max_num_draft,
            max_num_beams=requests.MAX_BEAMS,
            draft=self.drafts,
            tasks={name: {"prefix": task.prefix, **task.settings} for name, task in tasks},
            dtype=str(self._model.dtype).removeprefix("mlx.core."),
            exact=self.exact,
            notes=self.presets.notes,
        )
