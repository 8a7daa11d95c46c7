"""Defines the schemas of responses; FastAPI generates the description of the API (/docs) from them.

OpenAI's fields have the form that the official client expects. `TokenDetails` explains the counts
of prediction tokens in `usage`.

These fields are not in OpenAI's API: `speculation`, on request, lists the origin of each token;
`score` is the score of a beam search; `pieces` lists the pieces of a split text, and `stats` counts
the pieces.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Origin = Literal["draft", "copy", "target"]
Reason = Literal["stop", "length", "repetition"]
Capability = Literal["completions", "score", "rerank", "embeddings"]


class TokenDetails(BaseModel):
    """Counts of accepted and rejected tokens.

    A token of the request's `prediction` counts as accepted if it is in the answer, and as rejected
    if not; tokens after the end of the answer do not count. If the request has no `prediction`, the
    accepted and rejected proposals are counted.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ScoringUsage(BaseModel):
    """Token counts of a request that decodes nothing, end tokens included."""

    prompt_tokens: int
    total_tokens: int


class Usage(ScoringUsage):
    """Token counts of a request. Each prompt counts once; end tokens of answers do not count."""

    completion_tokens: int
    completion_tokens_details: TokenDetails


class TextStats(BaseModel):
    """Counts and times of one text so far; see `Stats` in mlx_t5/engine/rows.py."""

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
    """A token's text and its origin: the draft, a copy or the target."""

    text: str
    origin: Origin


class SpeculationDetails(BaseModel):
    """The tokens of a choice, with their origins. Joined, the tokens are the choice's text."""

    tokens: list[WrittenToken]
    stats: TextStats


class AnsweredPiece(BaseModel):
    """One piece of a text that was split, with its answer.

    The piece is the characters from `start` to `end` of the text. If the piece failed or was kept,
    `text` has these characters unchanged. A piece that was kept, or that looped and was cut, has no
    `speculation`.
    """

    start: int
    end: int
    text: str
    finish_reason: Reason | Literal["error"]
    error: str | None = None
    looped: bool | None = None
    speculation: SpeculationDetails | None = None


class PieceCounts(BaseModel):
    """Counts of the pieces of a text.

    `pieces` is the expected number of all pieces; it grows if sentences are too long. Of the pieces
    answered so far, `cut` counts those that are parts of such sentences, and `failed` counts those
    that failed. `looped` counts those that ran into a loop and were decoded again in smaller parts.
    `kept` counts those whose answer lacked a URL or an e-mail address of the source.
    `length` counts those that reached `max_tokens`.
    """

    pieces: int
    cut: int
    looped: int
    failed: int
    kept: int
    length: int


class Logprobs(BaseModel):
    """Log-probabilities of a completion; each list has one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AnswerChoice(BaseModel):
    """What the choices of completions and of chats have in common."""

    index: int
    finish_reason: Reason | None
    speculation: SpeculationDetails | None = None
    score: float | None = None
    pieces: list[AnsweredPiece] | None = None
    stats: PieceCounts | None = None


class CompletionChoice(AnswerChoice):
    """One text of a completion, or a chunk of it."""

    text: str
    logprobs: Logprobs | None


class Answer(BaseModel):
    """What the responses to completions and to chats have in common."""

    id: str
    created: int
    model: str
    usage: Usage | None = None


class Completion(Answer):
    """The response of /v1/completions, or a chunk of it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatToken(BaseModel):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatToken):
    """A token of the answer, with the likeliest tokens at its position."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    """The message of the answer; in a chunk, the part that the chunk adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatChoice(AnswerChoice):
    """One answer of a chat, or a chunk of it; a chunk has `delta` in place of `message`."""

    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    """The response of /v1/chat/completions, or a chunk of it."""

    object: Literal["chat.completion", "chat.completion.chunk"]
    choices: list[ChatChoice]


class Prediction(BaseModel):
    """The response of /predict."""

    text: str
    finish_reason: Reason
    stats: TextStats


class ServedModel(BaseModel):
    """The model that is served, with its limits and the defaults of requests.

    `capabilities` names the endpoints that the model serves, by the last part of their address.
    `tasks` has the prefix and the settings of each task. `notes` says what the model's files ask
    for in vain, such as beams, which come only from a request.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "local"
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
    notes: list[str]


class ModelList(BaseModel):
    """The response of /v1/models."""

    object: Literal["list"]
    data: list[ServedModel]


class AnswerList(BaseModel):
    """What the lists of vectors and of scores have in common."""

    object: Literal["list"]
    model: str
    usage: ScoringUsage


class EmbeddingEntry(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(AnswerList):
    """The response of /v1/embeddings."""

    data: list[EmbeddingEntry]


class ScoreEntry(BaseModel):
    """The log-probabilities of one target of the request; `tokens` has the texts of its tokens."""

    index: int
    logprob: float
    tokens: list[str]
    token_logprobs: list[float]


class ScoreList(AnswerList):
    """The response of /v1/score."""

    data: list[ScoreEntry]


class RankedDocument(BaseModel):
    """The text of a ranked document."""

    text: str


class RankEntry(BaseModel):
    """A ranked document; `relevance_score` is the probability that it is relevant.

    Cohere's and Jina's clients expect the document as an object, Infinity's as a text.
    """

    index: int
    relevance_score: float
    document: RankedDocument | str | None = None


class RankList(BaseModel):
    """The response of /v1/rerank, /v2/rerank and /rerank, the most relevant document first.

    `words` are the answers that the model was asked for: of relevant and of irrelevant documents.
    """

    id: str
    results: list[RankEntry]
    model: str
    usage: ScoringUsage
    words: list[str]
