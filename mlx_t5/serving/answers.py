"""Answers to requests, whole or chunk by chunk: the shapes of OpenAI's API, and what fills them.

Fields that are OpenAI's are what the official client expects. Some say more: in `usage`, the
prediction tokens that were accepted and rejected are those copied from the request's prediction,
and without one all proposals; `speculation`, on request, says who wrote each token; `score` is that
of a beam search.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from mlx_t5.engine.rows import Stats
from mlx_t5.serving.jobs import GenerationWork, TokenLogprob, Update
from mlx_t5.serving.tokenizing import Spelling

LEAST_LOGPROB = -9999.0  # OpenAI's ChatCompletionTokenLogprob: "the token is very unlikely"

Writer = Literal["draft", "copy", "target"]
Reason = Literal["stop", "length"]


class TokenDetails(BaseModel):
    """What became of the prediction's tokens; of all proposals where the request has none."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Token counts of a request; each prompt counts once, end tokens of texts do not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: TokenDetails


class TextStats(BaseModel):
    """Counts and times of one text so far; see `rows.Stats`."""

    model_config = ConfigDict(from_attributes=True)

    prompt_tokens: int
    generated_tokens: int
    target_calls: int
    drafted: int
    accepted: int
    acceptance_rate: float
    tokens_per_call: float
    encode_seconds: float
    decode_seconds: float
    tokens_per_second: float


class WrittenToken(BaseModel):
    """A token's text, and who wrote it."""

    text: str
    writer: Writer


class SpeculationDetails(BaseModel):
    """Who wrote the tokens of a choice; their texts joined are the choice's text."""

    tokens: list[WrittenToken]
    stats: TextStats


class Logprobs(BaseModel):
    """Log-probabilities of a completion, entry by entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(BaseModel):
    """One text of a completion."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Reason | None
    speculation: SpeculationDetails | None = None
    score: float | None = None


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ChatToken(BaseModel):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatToken):
    """A token of the answer."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    """The answer, or in a chunk what is added to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer; chunks have `delta` in place of `message`."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    speculation: SpeculationDetails | None = None
    score: float | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class Prediction(BaseModel):
    """The answer of /predict."""

    text: str
    finish_reason: Reason
    stats: TextStats


# ---- filled in -----------------------------------------------------------------------------------


def usage(work: GenerationWork, results: Sequence[Stats]) -> Usage:
    """The counts of a request, of what it asked for and the statistics of its texts."""
    prompt_tokens, predicted = sum(map(len, work.prompts)), bool(work.prediction)
    written = sum(stats.generated_tokens for stats in results)
    counted: list[Any] = [s.speculation if predicted else s for s in results]
    names = ("predicted", "predicted_accepted") if predicted else ("drafted", "accepted")
    drafted, accepted = (sum(getattr(one, name) for one in counted) for name in names)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=written,
        total_tokens=prompt_tokens + written,
        completion_tokens_details=TokenDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        ),
    )


def speculation(update: Update) -> SpeculationDetails:
    """Says who wrote what in a chunk; text after its last token counts as the target's."""
    chunk = update.chunk
    rest = chunk.text[sum(map(len, chunk.pieces)) :]
    # Of a stop string that several tokens make, the last ones have no piece.
    written = [*zip(chunk.pieces, chunk.writers, strict=False)]
    if rest:
        written.append((rest, "target"))
    tokens = [WrittenToken(text=text, writer=cast(Writer, writer)) for text, writer in written]
    return SpeculationDetails(tokens=tokens, stats=TextStats.model_validate(chunk.stats))


@dataclass
class CompletionBuilder:
    """Makes the parts of one completion.

    Attributes:
        model: name of the model served.
        spell: a token's id → how it looks by itself.
        logprobs: whether to include log-probabilities.
        detailed: whether to say who wrote each token.
    """

    model: str
    spell: Callable[[int], Spelling]
    logprobs: bool
    detailed: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)  # characters of each choice so far

    def answer(self, choices: Sequence[Any], counts: Usage | None, chunk: bool) -> BaseModel:
        """The answer, or a chunk of it; `counts` is left out if None."""
        return Completion(object="text_completion", **self._fields("cmpl", choices, counts))

    def _fields(self, kind: str, choices: Sequence[Any], counts: Usage | None) -> dict[str, Any]:
        fields = {"id": f"{kind}-{self.id}", "created": self.created, "model": self.model}
        return fields | {"choices": list(choices)} | ({} if counts is None else {"usage": counts})

    def choice(self, update: Update, chunk: bool) -> BaseModel:
        """One choice of a chunk, or of the whole answer."""
        text, reason = text_of(update, chunk)
        return Choice(
            index=update.index,
            text=text,
            logprobs=self._logprobs(update) if self.logprobs else None,
            finish_reason=reason,
            **self._details(update),
        )

    def _details(self, update: Update) -> dict[str, Any]:
        result = update.chunk.result
        score = {"score": result.score} if result and result.score is not None else {}
        return score | ({"speculation": speculation(update)} if self.detailed else {})

    def _logprobs(self, update: Update) -> Logprobs:
        entries, tokens = update.logprobs, completed(update)
        start = self.offsets.get(update.index, 0)
        *offsets, end = itertools.accumulate(map(len, tokens), initial=start)
        self.offsets[update.index] = end
        return Logprobs(
            tokens=tokens,
            token_logprobs=[json_number(entry.logprob) for entry in entries],
            top_logprobs=list(map(self._by_text, entries, tokens)),
            text_offset=offsets,
        )

    def _by_text(self, entry: TokenLogprob, text: str) -> dict[str, float]:
        """Likely tokens by their text, the written one by `text`.

        Of those that look the same, the likelier one; none that looks like the written one.
        """
        named: dict[str, float] = {}
        for token, value in entry.top:
            if token == entry.token:
                named[text] = json_number(value)
            elif (name := self.spell(token).text) != text:
                named.setdefault(name, json_number(value))
        return named


class ChatBuilder(CompletionBuilder):
    """Makes the parts of one chat completion."""

    def answer(self, choices: Sequence[Any], counts: Usage | None, chunk: bool) -> BaseModel:
        """As in `CompletionBuilder`."""
        kind: Any = "chat.completion.chunk" if chunk else "chat.completion"
        return ChatCompletion(object=kind, **self._fields("chatcmpl", choices, counts))

    def choice(self, update: Update, chunk: bool) -> BaseModel:
        """As in `CompletionBuilder`."""
        text, reason = text_of(update, chunk)
        is_first = update.index not in self.offsets
        self.offsets[update.index] = 0
        role: dict[str, Any] = {"role": "assistant"} if is_first else {}
        message: dict[str, Any] = {
            "delta" if chunk else "message": ChatMessage(content=text, **role)
        }
        content = [self._entry(entry) for entry in update.logprobs]
        return ChatChoice(
            index=update.index,
            logprobs=ChatLogprobs(content=content, refusal=None) if self.logprobs else None,
            finish_reason=reason,
            **message,
            **self._details(update),
        )

    def _entry(self, entry: TokenLogprob) -> ChatTokenLogprob:
        def named(token: int, value: float) -> dict[str, Any]:
            text, spelled = self.spell(token)
            return {"token": text, "logprob": json_number(value), "bytes": spelled}

        top = [ChatToken(**named(*other)) for other in entry.top]
        return ChatTokenLogprob(**named(entry.token, entry.logprob), top_logprobs=top)


def text_of(update: Update, chunk: bool) -> tuple[str, Reason | None]:
    """Returns the text, of this chunk or whole, and why it ended (None if it goes on)."""
    result = update.chunk.result
    if result is None:
        return update.chunk.text, None
    text = update.chunk.text if chunk else result.text or ""
    return text, cast(Reason, result.finish_reason)


def completed(update: Update) -> list[str]:
    """For each entry of log-probabilities, the text that its token completed.

    Joined they are the chunk's text, whatever tokens look like by themselves: of a character's
    bytes the last one completes it, a special token nothing, and what may begin a stop string is
    held back until a later token decides about it.
    """
    chunk, count = update.chunk, len(update.logprobs)
    texts = [*chunk.pieces, *[""] * count][:count]
    if texts:
        texts[-1] += chunk.text[sum(map(len, texts)) :]
    return texts


def json_number(logprob: float) -> float:
    """A token's log-probability as OpenAI's API has it; JSON has no minus infinity."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
