"""Answers to requests, whole or chunk by chunk, made of what the thread that decodes has told."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import BaseModel

from mlx_t5.engine.rows import Stats
from mlx_t5.serving.jobs import Progress
from mlx_t5.serving.logprobs import TokenLogprob
from mlx_t5.serving.shapes import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatToken,
    ChatTokenLogprob,
    Choice,
    Completion,
    Counts,
    Logprobs,
    Reason,
    SpeculationDetails,
    TokenDetails,
    Usage,
    Writer,
    WrittenToken,
)
from mlx_t5.serving.spelling import Spelling

LEAST_LOGPROB = -9999.0  # OpenAI's ChatCompletionTokenLogprob: "the token is very unlikely"


def usage(prompt_tokens: int, results: Sequence[Stats]) -> Usage:
    """The counts of a request.

    Args:
        prompt_tokens: of all its prompts.
        results: statistics of all its texts.
    """
    written, drafted = (
        sum(getattr(s, n) for s in results) for n in ("generated_tokens", "drafted")
    )
    accepted = sum(s.accepted for s in results)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=written,
        total_tokens=prompt_tokens + written,
        completion_tokens_details=TokenDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        ),
    )


def speculation(progress: Progress) -> SpeculationDetails:
    """Says who wrote what in a chunk; text after its last token counts as the target's."""
    chunk = progress.chunk
    rest = chunk.text[sum(map(len, chunk.pieces)) :]
    # Of a stop string that several tokens make, the last ones have no piece.
    tokens = [
        WrittenToken(text=text, writer=cast(Writer, writer))
        for text, writer in zip(chunk.pieces, chunk.writers, strict=False)
    ]
    if rest:
        tokens.append(WrittenToken(text=rest, writer="target"))
    return SpeculationDetails(tokens=tokens, stats=Counts.from_stats(progress.stats))


@dataclass
class CompletionForm:
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

    def whole(self, choices: Sequence[Any], counts: Usage | None, chunk: bool) -> BaseModel:
        """The answer, or a chunk of it; `counts` is left out if None."""
        more = {} if counts is None else {"usage": counts}
        return Completion(
            id=f"cmpl-{self.id}",
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=list(choices),
            **more,
        )

    def choice(self, progress: Progress, chunk: bool) -> BaseModel:
        """One choice of a chunk, or of the whole answer."""
        text, reason = text_of(progress, chunk)
        return Choice(
            index=progress.index,
            text=text,
            logprobs=self._logprobs(progress) if self.logprobs else None,
            finish_reason=reason,
            **self._details(progress),
        )

    def _details(self, progress: Progress) -> dict[str, Any]:
        result = progress.chunk.result
        score = {"score": result.score} if result and result.score is not None else {}
        return score | ({"speculation": speculation(progress)} if self.detailed else {})

    def _logprobs(self, progress: Progress) -> Logprobs:
        entries, tokens = progress.logprobs, completed(progress)
        start = self.offsets.get(progress.index, 0)
        *offsets, end = itertools.accumulate(map(len, tokens), initial=start)
        self.offsets[progress.index] = end
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


class ChatForm(CompletionForm):
    """Makes the parts of one chat completion."""

    def whole(self, choices: Sequence[Any], counts: Usage | None, chunk: bool) -> BaseModel:
        """As in `CompletionForm`."""
        more = {} if counts is None else {"usage": counts}
        return ChatCompletion(
            id=f"chatcmpl-{self.id}",
            object="chat.completion.chunk" if chunk else "chat.completion",
            created=self.created,
            model=self.model,
            choices=list(choices),
            **more,
        )

    def choice(self, progress: Progress, chunk: bool) -> BaseModel:
        """As in `CompletionForm`."""
        text, reason = text_of(progress, chunk)
        first = self.offsets.setdefault(progress.index, 0) == 0
        self.offsets[progress.index] = 1
        role: dict[str, Any] = {"role": "assistant"} if first or not chunk else {}
        message: dict[str, Any] = {
            "delta" if chunk else "message": ChatMessage(content=text, **role)
        }
        return ChatChoice(
            index=progress.index,
            logprobs=self._chat_logprobs(progress.logprobs) if self.logprobs else None,
            finish_reason=reason,
            **message,
            **self._details(progress),
        )

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        def named(token: int, value: float) -> dict:
            text, spelled = self.spell(token)
            return {"token": text, "logprob": json_number(value), "bytes": spelled}

        content = [
            ChatTokenLogprob(
                **named(entry.token, entry.logprob),
                top_logprobs=[ChatToken(**named(*other)) for other in entry.top],
            )
            for entry in entries
        ]
        return ChatLogprobs(content=content, refusal=None)


def text_of(progress: Progress, chunk: bool) -> tuple[str, Reason | None]:
    """Returns the text, of this chunk or whole, and why it ended (None if it goes on)."""
    result = progress.chunk.result
    if result is None:
        return progress.chunk.text, None
    text = progress.chunk.text if chunk else result.text or ""
    return text, cast(Reason, result.finish_reason)


def completed(progress: Progress) -> list[str]:
    """For each entry of log-probabilities, the text that its token completed.

    Joined they are the chunk's text, whatever tokens look like by themselves: of a character's
    bytes the last one completes it, a special token nothing, and what may begin a stop string is
    held back until a later token decides about it.
    """
    chunk, count = progress.chunk, len(progress.logprobs)
    texts = [*chunk.pieces, *[""] * count][:count]
    if texts:
        texts[-1] += chunk.text[sum(map(len, texts)) :]
    return texts


def json_number(logprob: float) -> float:
    """A token's log-probability as OpenAI's API has it; JSON has no minus infinity."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
