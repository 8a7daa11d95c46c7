"""From a request to the thread that decodes it, and its events back to whoever waits for them.

Everything here runs in the event loop, except that tokens are made in a thread of their own, with a
copy of the tokenizer: a long prompt must delay neither other clients nor the batch.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_t5.checkpoints.generation_config import FILE, Preset, combined, find_task
from mlx_t5.errors import UserError
from mlx_t5.requests import Settings
from mlx_t5.serving import api
from mlx_t5.serving.errors import ApiError
from mlx_t5.serving.jobs import Failure, Job, Progress, QueueFull, Stopped
from mlx_t5.serving.spelling import Speller
from mlx_t5.text.prompts import token_ids

if TYPE_CHECKING:
    from mlx_t5.serving.worker import Worker

log = logging.getLogger(__name__)

USUAL_MAX_TOKENS = 256  # where a request names none; as in main.py
NO_TASK = Preset("no task")
STATUS = {"input": 400, "memory": 503, "internal": 500}  # of `Failure.kind`


class ClientGone(Exception):
    """Nobody waits for the answer any longer."""


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for.

    Attributes:
        prompt_tokens: of one prompt.
        max_tokens: of one text.
        rows: texts of one request.
    """

    prompt_tokens: int
    max_tokens: int
    rows: int


@dataclass(frozen=True)
class Presets:
    """What the model's own files want.

    Attributes:
        general: of every request.
        tasks: of those that name one.
    """

    general: Preset = Preset(FILE)
    tasks: Mapping[str, Preset] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Lines about what is left out: of every request, and of tasks."""
        names = dict.fromkeys(name for task in self.tasks.values() for name in task.left_out)
        tasks = Preset("tasks", left_out=tuple(names))
        return [preset.note for preset in (self.general, tasks) if preset.left_out]


class Exchange:
    """One job's events, in the event loop."""

    def __init__(self, cancel: Callable[[Job], None]):
        self.job: Job  # given by whoever makes the exchange, before anything else
        self._cancel = cancel
        self._events: asyncio.Queue[Progress | Failure | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Progress | Failure) -> None:
        """Takes an event, from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def watch(self, receive: Callable[[], Any]) -> None:
        """Withdraws the job once its client is gone; also ends when the response is complete."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.close()

    def close(self) -> None:
        """Withdraws the job, if it is not done."""
        self._cancel(self.job)
        self._events.put_nowait(None)

    async def next(self) -> Progress:
        """The next event.

        Raises:
            ApiError: the job has failed.
            ClientGone: there is nobody to tell.
        """
        event = await self._events.get()
        if event is None:
            raise ClientGone
        if isinstance(event, Failure):
            raise ApiError(STATUS[event.kind], event.message)
        return event

    async def events(self, first: Progress) -> AsyncIterator[Progress]:
        """All events from `first` on, until every row is done."""
        event, left = first, self.job.size
        while True:
            left -= event.chunk.result is not None
            yield event
            if not left:
                return
            event = await self.next()

    async def finished(self) -> list[Progress]:
        """The last event of every row, in their order; for jobs that do not stream."""
        last = [event async for event in self.events(await self.next())]
        return sorted(last, key=lambda event: event.index)


def several(
    settings: Settings,
    body: api.Decoding,
    samples: int = 1,
    stream: bool = False,
    logprobs: int | None = None,
    **_: Any,
) -> Settings:
    """Settings for so many texts a prompt: those of one search, or sampled ones.

    Args:
        settings: of the request, its task and the server.
        body: the request.
        samples: texts a prompt.
        stream: as of `Job`.
        logprobs: as of `Job`.

    Raises:
        ApiError: they cannot be had, or not in this way.
    """
    beams, search = f"num_beams is {settings.num_beams}", settings.num_beams > 1
    refusals = {
        "stream": (search and stream, f"{beams}: a text is known at its end; leave stream out"),
        "logprobs": (search and logprobs is not None, f"{beams}: beams have none; leave them out"),
        "n": (
            search and samples > settings.num_beams,
            f"n is {samples} and {beams}; n is too many",
        ),
        "temperature": (
            samples > 1 and not search and settings.temp == 0,
            f"n is {samples}, but greedy texts would be equal; set temperature above 0",
        ),
        "num_beams": (
            not search and any(body.search.get(n) is not None for n in api.OF_BEAMS),
            f"{' and '.join(api.OF_BEAMS)} need num_beams above 1",
        ),
    }
    for name, (refused, message) in refusals.items():
        if refused:
            raise ApiError(400, message, "n" if name == "temperature" else name)
    return replace(settings, num_return_sequences=samples) if search else settings


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
        self.drafts = decoder.drafter is not None
        self.log_prompts, self.created = log_prompts, int(time.time())
        self._dtype = str(decoder.model.dtype).removeprefix("mlx.core.")
        self._vocab_size = decoder.model.config.vocab_size
        self._tokenizer = copy.deepcopy(decoder.tokenizer)
        self.spell = Speller(self._tokenizer)
        self._longest = max(map(len, self._tokenizer.get_vocab()))  # characters of a token
        self._executor = ThreadPoolExecutor(1, "tokenizer")
        self._watching: set[asyncio.Task] = set()

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
        task = self._task(body, prompts)
        settings = several(self._settings(body, task), body, **wishes)
        size = len(prompts) * wishes.get("samples", 1)
        if size > self.limits.rows:
            raise ApiError(
                400,
                f"{size} texts are more than one request may ask for here "
                f"({self.limits.rows}); send several",
                "n",
            )
        ids = [
            await self._token_ids(task.prefix + prompt if isinstance(prompt, str) else prompt)
            for prompt in prompts
        ]
        seed = secrets.randbelow(2**53) if body.seed is None else body.seed
        exchange = Exchange(self.worker.cancel)
        job = exchange.job = Job(ids, settings, seed, exchange.put, **wishes)
        if self.log_prompts:
            log.info("prompts: %r", list(prompts))
        self._hand_in(job)
        watching = asyncio.create_task(exchange.watch(receive))
        self._watching.add(watching)  # the loop itself holds tasks weakly
        watching.add_done_callback(self._watching.discard)
        return exchange

    def _hand_in(self, job: Job) -> None:
        try:
            self.worker.submit(job)
        except QueueFull as error:
            headers = {"Retry-After": str(error.retry_after)}
            raise ApiError(429, str(error), code="queue_full", headers=headers) from None
        except Stopped as error:
            raise ApiError(503, str(error), headers={"Retry-After": "5"}) from None

    def _task(self, body: api.Decoding, prompts: Sequence) -> Preset:
        """The task that a request names; one that wants nothing where it names none."""
        if body.task is None:
            return NO_TASK
        try:
            task = find_task(self.presets.tasks, body.task)
        except UserError as error:
            raise ApiError(400, str(error), "task") from None
        if task.prefix and not all(isinstance(prompt, str) for prompt in prompts):
            raise ApiError(400, "task puts a text before the prompt; send that as text", "task")
        return task

    def _settings(self, body: api.Decoding, task: Preset = NO_TASK) -> Settings:
        given: dict[str, Any] = {
            "max_tokens": body.max_tokens,
            "temp": body.temperature,
            "top_p": body.top_p,
            "delta": body.delta,
            "num_draft": body.wanted_draft,
            "stop": body.stops or None,
        } | body.search
        if body.max_tokens and body.max_tokens > self.limits.max_tokens:
            message = (
                f"max_tokens: at most {self.limits.max_tokens} here; the server's --max-tokens"
            )
            raise ApiError(400, message, "max_tokens")
        asked = body.draft or body.num_draft
        if asked and not self.drafts:
            raise ApiError(400, "this server has no draft; leave draft and num_draft out", "draft")
        given = {name: value for name, value in given.items() if value is not None}
        wishes = combined(self._usual, task.settings, given)
        longest = wishes.get("max_tokens", USUAL_MAX_TOKENS)
        wishes["max_tokens"] = min(longest, self.limits.max_tokens)
        return replace(self._unset, **wishes)

    async def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str) and len(prompt) > self.limits.prompt_tokens * self._longest:
            raise self._too_long("more")  # no need to count
        if not isinstance(prompt, str) and len(prompt) > self.limits.prompt_tokens:
            raise self._too_long(f"{len(prompt)}")  # before every id is looked at
        work = partial(token_ids, prompt, self._tokenizer, self._vocab_size)
        try:
            ids = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from None
        if len(ids) > self.limits.prompt_tokens:
            raise self._too_long(f"{len(ids)}")
        return ids

    def _too_long(self, count: str) -> ApiError:
        message = (
            f"the prompt has {count} tokens; at most {self.limits.prompt_tokens} are taken here "
            "(the server's --max-prompt-tokens); shorten it"
        )
        return ApiError(400, message, "prompt", "context_length_exceeded")

    def describe(self) -> dict[str, Any]:
        """What a client may want to know before it asks."""
        return {
            "max_prompt_tokens": self.limits.prompt_tokens,
            "max_tokens": self.limits.max_tokens,
            "num_draft": self.defaults.num_draft,
            "max_num_draft": api.MAX_NUM_DRAFT,
            "delta": self.defaults.delta,
            "draft": self.drafts,
            "tasks": list(self.presets.tasks),
            "dtype": self._dtype,
        }
