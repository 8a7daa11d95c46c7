"""Schemas of answers: those of OpenAI's API, and more. The API's description is made of them.

OpenAI's fields are as the official client expects. Some have more information: in `usage`, the
accepted prediction tokens are those in the text, and without a prediction the two counts are those
of proposals. `speculation`, on request, has the writer of each token; `score` is a beam search's;
`pieces` are those of a text that was split.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Writer = Literal["draft", "copy", "target"]
Reason = Literal["stop", "length"]
Capability = Literal["completions", "score", "rerank", "embeddings"]


class TokenDetails(BaseModel):
    """Counts of the prediction's tokens; of all proposals if the request has no prediction."""

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


class AnsweredPiece(BaseModel):
    """The answer to the characters from `start` to `end` of the text that was split.

    A failed piece has these characters as its text.
    """

    start: int
    end: int
    text: str
    finish_reason: Literal["stop", "length", "error"]
    error: str | None = None
    speculation: SpeculationDetails | None = None


class PieceCounts(BaseModel):
    """Numbers of pieces so far: all, parts of sentences that were too long, and failed ones."""

    pieces: int
    cut: int
    failed: int


class Logprobs(BaseModel):
    """Log-probabilities of a completion, entry by entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text of a completion."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Reason | None
    speculation: SpeculationDetails | None = None
    score: float | None = None
    pieces: list[AnsweredPiece] | None = None
    stats: PieceCounts | None = None


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
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
    pieces: list[AnsweredPiece] | None = None
    stats: PieceCounts | None = None


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


class ServedModel(BaseModel):
    """The model that is served, with its limits and the defaults of requests.

    `capabilities` are the last parts of addresses; `tasks` have a prefix and settings, each.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: list[Capability]
    max_prompt_tokens: int
    max_tokens: int
    num_draft: int | Literal["auto"]
    max_num_draft: int
    delta: float
    num_beams: int
    max_num_beams: int
    length_penalty: float
    draft: bool
    tasks: dict[str, dict[str, Any]]
    dtype: str
    exact: bool


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ServedModel]
