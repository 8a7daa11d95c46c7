"""Defines which requests are valid.

Unsupported input is refused, never ignored: an unknown field is an error, and fields of OpenAI's
API that ask for something else than a text (`tools`, `audio`, …) may only have the values that
change nothing. Types are strict: "5" is no number and 1 is no boolean. In a long list, and among
unknown fields, only the first error is reported, because a body of 1 MiB may have 300,000 errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from mlx_t5.serving.limits import (
    MAX_ALTERNATIVES,
    MAX_BEAMS,
    MAX_DOCUMENTS,
    MAX_INPUTS,
    MAX_LANGUAGE,
    MAX_NUM_DRAFT,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TARGETS,
)
from mlx_t5.settings import FILE_TYPES, LARGEST_COUNT, SETTINGS, SPLITS, Repetition, Setting
from mlx_t5.text.prompts import as_list as listed_prompts
from mlx_t5.text.prompts import split_unit

# OpenAI's API has the same limit of the temperature.
MAX_VALUES = {
    "max_tokens": LARGEST_COUNT,
    "temp": 2,
    "num_draft": MAX_NUM_DRAFT,
    "num_beams": MAX_BEAMS,
}

Number = Annotated[float, Field(allow_inf_nan=False)]
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=100_000, fail_fast=True)]
Many = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Several = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
Scored = Field(min_length=1, max_length=MAX_TARGETS, fail_fast=True)
Model = Annotated[str | None, Field(description="absent: the model that is served")]
Task = Annotated[
    Text | None, Field(description="a task of the model: its prefix, and its settings as defaults")
]
Unused = Annotated[Any, Field(description="accepted and not used")]
# The values of OpenAI's fields that change nothing; null is one for every field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call", "reasoning_effort"), ("none",)),
    **dict.fromkeys(("audio", "web_search_options", "moderation"), ()),
    **dict.fromkeys(("store", "echo"), (False,)),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
    "suffix": ("",),
    "best_of": (1,),
}
# OpenAI's fields that do not concern the text.
UNUSED = (
    "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "metadata", "parallel_tool_calls",
)  # fmt: skip
Language = Annotated[str, Field(min_length=1, max_length=MAX_LANGUAGE)] | None
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # in OpenAI's chats
ONE_TURN = (["user"], ["system", "user"], ["developer", "user"])
OF_BEAMS = [name for name, s in SETTINGS.items() if s.only_with == "beams" and s.request]


class Request(BaseModel):
    """The base of all requests: types are strict, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        first = next((name for name in body if name not in fields), None)
        return {name: value for name, value in body.items() if name in fields or name == first}


def _field(name: str, setting: Setting) -> Any:
    """The type (with bounds) and the default of the request field for a setting."""
    allowed = setting.range
    bounds: dict[str, Any] = {}
    if allowed.kind is not bool:
        least = min([allowed.least, *(n for n in allowed.besides if not isinstance(n, str))])
        bounds = {"gt": 0} if least == math.ulp(0.0) else {"ge": least}
        most = min(allowed.most, MAX_VALUES.get(name, math.inf))
        if most < math.inf:
            bounds["le"] = most

    def fit(value: Any) -> Any:
        if not allowed.holds(value):
            raise ValueError(f"it must be {allowed.expected}")
        return value

    number = Number if allowed.kind is float else allowed.kind
    kind: Any = Annotated[number, Field(**bounds), AfterValidator(fit)]
    for word in allowed.besides:
        if isinstance(word, str):
            kind = kind | Literal[word]
    return kind | None, Field(None, description=setting.help)


def _one_of(values: Sequence[str], description: str) -> Any:
    """The type and the default of a field with one of these values."""
    return Literal[tuple(values)] | None, Field(None, description=description)


def _only(*values: Any) -> Any:
    """The type and the default of a field that may only be null or one of these values."""

    def check(value: Any) -> Any:
        flag = isinstance(value, bool)  # True equals 1, and False equals 0
        if value not in [None, *(v for v in values if isinstance(v, bool) == flag)]:
            raise ValueError("this is not supported; leave it out")
        return value

    schema = Field(json_schema_extra={"enum": [None, *values]})
    return Annotated[Any, AfterValidator(check), schema], None


_settings: Any = {s.request: _field(name, s) for name, s in SETTINGS.items() if s.request}
_choices: Any = {
    "split": _one_of(
        SPLITS,
        "decode the text piece by piece, each after the task's prefix, and join the answers with "
        "the text between the pieces; the answer also lists the pieces",
    ),
    "file_type": _one_of(
        FILE_TYPES, "if the text is split: its file's type; subtitles keep their times"
    ),
    **{name: _only(*values) for name, values in NEUTRAL.items()},
    **dict.fromkeys(UNUSED, (Unused, None)),
}
_WithSettings: Any = create_model("_WithSettings", __base__=Request, **_settings)
_WithChoices: Any = create_model("_WithChoices", __base__=Request, **_choices)


class TextPart(Request):
    """One part of the text of a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Unused = None


class Content(Request):
    """A text, whole or in parts."""

    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class PredictedContent(Content):
    """The expected text of an answer."""

    type: Literal["content"]


class Decoding(_WithSettings):
    """The settings of a request; a field that is absent or null gets the server's default.

    The class has a field for every setting in settings.py that declares a `request` name.
    """

    text_field: ClassVar[str] = "prompt"  # the name of the field that has the text to work on
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        None, description="the same seed gives the same text; absent: a new seed each time"
    )
    stop: ShortText | Annotated[list[ShortText], Field(max_length=MAX_STOP_STRINGS)] | None = None
    repetition_detection: Annotated[dict[str, Any], AfterValidator(Repetition.of)] | None = Field(
        None,
        description="end a text in a loop: max_pattern_size, min_pattern_size, min_count as in "
        "vLLM, but only one copy of the pattern stays; null: off; absent: on only in translations",
    )
    draft: bool | None = Field(None, description="false decodes regularly, without proposals")
    prediction: PredictedContent | None = Field(
        None,
        description="the expected text: proposals are copied from it, which makes decoding faster "
        "where it is right; with delta 0 the answer does not change",
    )
    task: Task = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in the request, by their names in `Settings`."""
        values = {name: getattr(self, s.request) for name, s in SETTINGS.items() if s.request}
        values["stop"] = self.stop or None
        if "repetition_detection" in self.model_fields_set:
            values["repetition_detection"] = Repetition.of(self.repetition_detection)
        if self.draft is False:
            values["num_draft"] = 0
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _search(self) -> Decoding:
        search = self.settings.get("num_beams", 1) > 1
        for name in OF_BEAMS:
            if name in self.settings and not search:
                raise ValueError(f"{name} requires num_beams above 1")
        for name in ("temperature", "delta", "prediction", "repetition_detection"):
            if search and getattr(self, name):
                raise ValueError(f"num_beams cannot be combined with {name}")
        return self


class PredictRequest(Decoding):
    """The body of POST /predict, the simplest request: one text, whole."""

    prompt: Text
    n: ClassVar[None] = None
    stream: ClassVar[None] = None
    speculation: ClassVar[None] = None
    alternatives: ClassVar[None] = None
    target_language: ClassVar[None] = None
    unit: ClassVar[str] = "none"

    @property
    def prompts(self) -> list[str]:
        return [self.prompt]


class StreamOptions(Request):
    """Options for an answer that is sent as a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="accepted; nothing is added")


class OpenAIRequest(Decoding, _WithChoices):
    """The fields that completions and chat completions have in common."""

    model: Model = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: bool | None = Field(
        None, description="also report each token's origin (draft, copy or target), and counts"
    )
    target_language: Language = Field(
        None,
        description="translate into this language, such as de, with the model's own prefix for "
        "it; the text is split into sentences, unless n, logprobs or prediction need it whole",
    )
    source_language: Language = Field(
        None,
        description="if the text is split or translated: its language, such as de, whose rules "
        "say where a sentence ends; absent: the language that the prefix names, or English",
    )

    @property
    def unit(self) -> str:
        """What becomes a piece of the text, one of `SPLITS`."""
        whole = (self.n or 1) > 1 or self.alternatives is not None or self.prediction
        return split_unit(self.split, self.target_language, whole)

    @model_validator(mode="after")
    def _consistent(self) -> OpenAIRequest:
        beams = self.settings.get("num_beams", 1)
        if beams > 1 and self.stream and self.unit == "none":
            raise ValueError("num_beams cannot be combined with stream")
        if beams > 1 and self.alternatives is not None:
            raise ValueError("num_beams cannot be combined with logprobs")
        if 1 < beams < (self.n or 1):
            raise ValueError("n is above num_beams")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.file_type and self.unit == "none":
            raise ValueError("file_type requires split")
        if self.source_language and self.unit == "none" and not self.target_language:
            raise ValueError("source_language requires split or target_language")
        if self.target_language and self.task:
            raise ValueError("target_language cannot be combined with task")
        if self.prediction and len(self.prompts) > 1:
            raise ValueError("prediction: it belongs to one prompt; send a request for each")
        return self


class CompletionRequest(OpenAIRequest):
    """The body of POST /v1/completions."""

    prompt: (
        Text | Annotated[list[Text], Several] | TokenIds | Annotated[list[TokenIds], Several]
    ) = Field(description="one text or several, or the same as token ids")
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None

    @property
    def prompts(self) -> Sequence[str] | Sequence[list[int]]:
        return listed_prompts(self.prompt)[0]

    @property
    def parts(self) -> list[Any]:
        """The prompt as a one-entry list; `Service.cut` refuses a prompt that is not one text."""
        return [self.prompt]

    @property
    def alternatives(self) -> int | None:
        """The number of likeliest tokens to show per position; None: no log-probabilities."""
        return self.logprobs


class Message(Content):
    """One message of a chat."""

    role: Literal["system", "developer", "user"]
    name: Unused = None


class ChatRequest(OpenAIRequest):
    """The body of POST /v1/chat/completions, for one turn.

    T5 has no chat format. The prompt is the user's message. A system message, such as "translate
    English to German:", is put before the user's message, with a space between the two.
    """

    text_field = "messages"
    messages: Annotated[list[Message], Field(min_length=1, max_length=2)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_turn(cls, body: Any) -> Any:
        """Refuses conversations, before the fields of their other messages are looked at."""
        turns = body.get("messages") if isinstance(body, dict) else None
        turns = turns if isinstance(turns, list) else []
        roles = [turn.get("role") for turn in turns if isinstance(turn, dict)]
        if roles and roles not in ONE_TURN and all(role in ROLES for role in roles):
            cure = "send one user message, with at most one system message before it"
            raise ValueError(f"messages: this model answers single turns; {cure}")
        return body

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        if not self.messages[-1].text.strip():
            raise ValueError("messages: the user message is empty; write what to work on")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in the request; of `max_tokens` and `max_completion_tokens` the smaller."""
        values = super().settings
        if self.max_completion_tokens is not None:
            limit = values.get("max_tokens", self.max_completion_tokens)
            values["max_tokens"] = min(limit, self.max_completion_tokens)
        return values

    @property
    def prompts(self) -> list[str]:
        """One prompt: the texts of the messages, joined by a space."""
        return [" ".join(map(str.strip, self.parts)).strip()]

    @property
    def parts(self) -> list[str]:
        """The system message's text, if there is a system message, and the user message's text."""
        return [message.text for message in self.messages]

    @property
    def alternatives(self) -> int | None:
        """The number of likeliest tokens to show per position; None: no log-probabilities."""
        if not self.logprobs:
            return None
        return self.top_logprobs or 0


TextRequest = CompletionRequest | ChatRequest


class EmbeddingRequest(Request):
    """The body of POST /v1/embeddings."""

    input: Text | Annotated[list[Text], Many] | TokenIds | Annotated[list[TokenIds], Many] = Field(
        description="one text or several, or the same as token ids"
    )
    model: Model = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the bytes of float32 numbers, little-endian"
    )
    normalize: bool | None = Field(None, description="true: scale vectors to length 1")
    task: Task = None
    dimensions: None = Field(None, description="not supported: absent")
    user: Unused = None

    @property
    def inputs(self) -> list[Any]:
        return listed_prompts(self.input)[0]


class ScoreRequest(Request):
    """The body of POST /v1/score."""

    prompt: Text | TokenIds
    targets: Annotated[list[Text | TokenIds], Scored] = Field(
        description="the end token is added to a text; token ids are scored as they are"
    )
    task: Task = None
    model: Model = None


class RankedText(Request):
    """A document to rank, as an object."""

    text: Text


class RerankRequest(Request):
    """The body of POST /v1/rerank, /v2/rerank and /rerank.

    `words` are the model's answers for relevant and for irrelevant documents.
    """

    query: Text
    documents: Annotated[list[Text | RankedText], Scored]
    top_n: Annotated[int, Field(ge=1, le=MAX_DOCUMENTS)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    words: Annotated[list[ShortText], Field(min_length=2, max_length=2)] | None = None
    return_documents: bool | None = None
    model: Model = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]
