"""A text in the engine: its row, its statistics, its chunks and its result; sums over results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx
from mlx_t5.drafting.adaptive import AcceptanceStats
from mlx_t5.drafting.source_copy import count_predicted
from mlx_t5.errors import brief
from mlx_t5.sampling.beam_search import BeamSearch
from mlx_t5.settings import AUTO, Settings
from mlx_t5.text.detokenizer import TextWatch, decode
from mlx_t5.text.repetition import uncertain, until_repetition

if TYPE_CHECKING:
    from mlx_t5.engine.document_results import DocumentInFlight
    from mlx_t5.engine.reuse import Key, StoredText
    from mlx_t5.text.prompts import Prompt

NO_CHOICE = (
    "the model's logits after {} tokens are NaN, infinite or all forbidden; check the {}weights, "
    "bfloat16 or float32 if they are float16"
)


@dataclass
class Speculation:
    """Statistics of the proposals for one prompt.

    Attributes:
        copied: number of proposals that were copied from the source or the caller's prediction.
        copied_accepted: number of copied proposals that were accepted.
        predicted: how many tokens of the caller's prediction were compared with the finished text.
        predicted_accepted: how many of these tokens the text has too, whoever proposed them.
        steps_by_length: how many steps had 0, 1, … proposals.
        steps_by_accepted: how many steps accepted 0, 1, … proposals.
        drafted_by_position: how many steps had a first, second, … proposal.
        accepted_by_position: how many steps accepted their first, second, … proposal.
    """

    copied: int = 0
    copied_accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    steps_by_length: list[int] = field(default_factory=list)
    steps_by_accepted: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def alpha(self) -> float:
        """Estimated probability that a proposal is accepted; 0 if none was verified."""
        drafted, accepted = self.drafted_by_position, self.accepted_by_position
        # Position i was verified in the steps that accepted position i - 1 and had a proposal at i.
        # The counts do not say how many steps did both, so the smaller count is taken.
        verified = sum(map(min, [*drafted[:1], *accepted], drafted))
        return sum(accepted) / max(verified, 1)


def _add(sums: Stats | Speculation, more: Stats | Speculation) -> None:
    """Adds each field of `more` to the same field of `sums`; adds lists position by position."""
    for name, added in vars(more).items():
        value = getattr(sums, name, None)
        if isinstance(value, Speculation):
            _add(value, added)
        elif isinstance(value, list):
            setattr(sums, name, [a + b for a, b in zip_longest(value, added, fillvalue=0)])
        elif value is not None:
            setattr(sums, name, value + added)


@dataclass
class Stats:
    """Counts and times of one prompt, in seconds of wall clock; no tokens after the text's end.

    Attributes:
        prompt_tokens: source tokens, EOS included.
        generated_tokens: tokens of the result, EOS not included.
        target_calls: forward passes of the target's decoder.
        drafted: tokens proposed.
        accepted: proposals that are part of the output, EOS included.
        acceptance_rate: accepted / drafted, 0 when nothing was drafted.
        tokens_per_call: tokens decided, EOS included, per target call; 1 in regular decoding.
        encode_seconds: time of the target's encoder.
        decode_seconds: time of all steps that this row took part in, and of the draft's encoder.
            Rows decoded together share their steps.
        tokens_per_second: generated_tokens / decode_seconds.
        peak_memory_bytes: peak of MLX's memory during the call.
        reused: texts that were taken from an equal prompt instead of decoded; their counts are 0
            but for the tokens of prompt and result, and the tokens that were drafted and accepted
            when the equal prompt was decoded.
        reused_tokens: tokens of these texts.
        speculation: further statistics of the proposals.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    target_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_rate: float = 0.0
    tokens_per_call: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_memory_bytes: int = 0
    reused: int = 0
    reused_tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)

    def count(self, drafted: int, accepted: int, origin: str) -> None:
        """Counts a step that accepted `accepted` of `drafted` proposals, made by `origin`."""
        self.drafted += drafted
        self.accepted += accepted
        speculation = self.speculation
        for counts, size, positions in (
            (speculation.steps_by_length, drafted + 1, [drafted]),
            (speculation.steps_by_accepted, accepted + 1, [accepted]),
            (speculation.drafted_by_position, drafted, range(drafted)),
            (speculation.accepted_by_position, drafted, range(accepted)),
        ):
            counts += [0] * (size - len(counts))
            for position in positions:
                counts[position] += 1
        if origin != "draft":
            speculation.copied += drafted
            speculation.copied_accepted += accepted

    @property
    def decided(self) -> int:
        """The number of tokens decided, EOS included."""
        return round(self.tokens_per_call * self.target_calls)

    def add(self, other: Stats) -> None:
        """Adds another text's counts and times; the peak of memory is the larger one."""
        decided = self.decided + other.decided
        peak = max(self.peak_memory_bytes, other.peak_memory_bytes)
        _add(self, other)
        self.peak_memory_bytes = peak
        self.update_rates(self.generated_tokens, decided)

    def update_rates(self, generated: int, decided: int) -> None:
        self.generated_tokens = generated
        self.acceptance_rate = self.accepted / max(self.drafted, 1)
        self.tokens_per_call = decided / self.target_calls if self.target_calls else 0.0
        if self.decode_seconds > 0:
            self.tokens_per_second = (generated - self.reused_tokens) / self.decode_seconds


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token's natural log-probability, and those of the likeliest tokens there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Row:
    """A text in the engine: its prompt, its settings and its state."""

    ids: list[int]  # source tokens
    settings: Settings
    key: mx.array | None = None  # (2,) the row's own random key; None if it is greedy
    tokenizer: Any = None  # None: the row has no text
    tokens: list[int] = field(default_factory=list)  # the start token, and all tokens decided
    origins: list[str] = field(default_factory=list)  # as in `Result`
    finish_reason: str | None = None  # None while running
    error: str | None = None
    stats: Stats = field(default_factory=Stats)
    watch: TextWatch | None = None  # None if nobody needs the text before the end
    ended: bool = False  # whether the last token is an end token
    held: int = 0  # number of last tokens that go if the row turns out to be in a loop
    removed: list[int] = field(default_factory=list)  # the tokens that went
    # Steps with held tokens: where they start and end, how many were drafted and accepted, by whom.
    uncounted: list[tuple[int, int, int, int, str]] = field(default_factory=list)
    prediction: Sequence[int] = ()  # the text that the caller expects, to copy proposals from
    answer_key: Key | None = None  # rows of one key have one answer, see engine/reuse.py
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)  # of its proposals
    search: BeamSearch | None = None  # its best beam is `tokens`; None without beams
    score: float | None = None
    states: mx.array | None = None  # the target's encoder output, until the row joins the batch
    document: DocumentInFlight | None = None  # of which the row decodes a piece
    # Of a piece that may loop: its prompt, and a function that makes the row of a part's prompt.
    piece: tuple[Prompt, Callable[[Prompt], Row]] | None = None
    parts: list[Row] = field(default_factory=list)  # in which a piece that looped is decoded again
    whole: Row | None = None  # of which the row is a part
    joined: Result | None = None  # the result of all parts
    index: int = 0  # among all texts of its request; the first of those of a beam search
    reported: int = 0  # tokens already in chunks
    logprobs: list[TokenLogprob] = field(default_factory=list)  # for the next chunk

    def __post_init__(self) -> None:
        settings = self.settings
        # Whether other rows and the clock may affect the number of proposals.
        self.adapts = settings.num_draft == AUTO and settings.temp == 0 and settings.delta == 0

    @property
    def decided(self) -> int:
        return len(self.tokens) - 1

    @property
    def generated(self) -> int:
        """The number of tokens that stay, whatever comes next, without an end token."""
        certain = self.decided - self.held
        return certain - 1 if self.ended else certain

    @property
    def max_proposals(self) -> int:
        """The maximum number of proposals in the next step; the target adds one more token."""
        return self.settings.max_tokens - len(self.tokens)

    def commit(
        self, tokens: list[int], drafted: int, origin: str, eos: Sequence[int]
    ) -> tuple[list[int], int]:
        """Adds a step's tokens, up to the end of the text: an end token, a stop string or a loop.

        `tokens` are the accepted proposals and the target's own token; if that is `NO_TOKEN`, the
        row fails unless the text ends before. Returns the tokens added, and how many are proposals.
        """
        accepted, finite = len(tokens) - 1, tokens[-1] >= 0
        if not finite:
            tokens = tokens[:accepted]
        end = next((i for i, token in enumerate(tokens) if token in eos), None)
        self.ended = end is not None
        if end is not None:
            tokens = tokens[: end + 1]
        start, copies = self.decided, 0
        detection = self.settings.repetition_detection
        detects = detection.max_pattern_size > 0
        if detects:
            text, least = tokens[:-1] if self.ended else tokens, self.settings.min_tokens
            count, copies = until_repetition(self.tokens[1:], text, detection, least)
        if copies:
            tokens, self.ended = text[:count], False
        if self.watch:
            count = self.watch.take(tokens[:-1] if self.ended else tokens)
            if self.watch.stopped:
                tokens, self.ended, copies = tokens[:count], False, 0
        if self.ended or copies or (self.watch and self.watch.stopped):
            drafted, accepted = min(drafted, len(tokens)), min(accepted, len(tokens))
            self.finish_reason = "repetition" if copies else "stop"
        self.tokens += tokens
        self.origins += [origin] * accepted + ["target"] * (len(tokens) - accepted)
        if self.finish_reason is None and self.max_proposals < 0:
            self.finish_reason = "length"
        if copies:
            self._remove(copies)
        if self.watch and self.finish_reason:
            self.watch.finish()
        self.stats.target_calls += 1
        if detects:
            self.held = 0 if self.finish_reason else uncertain(self.tokens[1:], detection)
            self.uncounted.append((start, start + len(tokens), drafted, accepted, origin))
            self._count_certain()
        else:
            self.stats.count(drafted, accepted, origin)
        if not finite and self.finish_reason is None:
            self.fail_without_choice(self.decided)
        return tokens, accepted

    def _remove(self, copies: int) -> None:
        """Removes the last tokens, which are copies of those before."""
        self.removed, self.tokens = self.tokens[-copies:], self.tokens[:-copies]
        self.origins = self.origins[:-copies]
        if self.watch:  # what it held back may belong to the copies
            self.watch = TextWatch(self.tokenizer, tuple(self.settings.stop))
            self.watch.take(self.tokens[1:])

    def _count_certain(self) -> None:
        """Counts the steps whose tokens cannot go any more; proposals that went do not count."""
        certain = self.decided - self.held
        while self.uncounted and (self.finish_reason or self.uncounted[0][1] <= certain):
            start, end, drafted, accepted, origin = self.uncounted.pop(0)
            if end > self.decided:
                kept = max(self.decided - start, 0)
                drafted, accepted = min(drafted, kept), min(accepted, kept)
            self.stats.count(drafted, accepted, origin)

    def reuse(self, answer: StoredText, eos: Sequence[int]) -> None:
        """Takes the whole text of an equal row, which has finished."""
        self.tokens = answer.tokens[:1]
        self.settings = answer.settings  # max_tokens may be lowered to what memory allows
        self.commit(answer.tokens[1:], len(answer.tokens) - 2, "target", eos)
        self.origins = list(answer.origins)
        self.stats = Stats(len(self.ids), reused=1, reused_tokens=self.generated)
        self.stats.drafted, self.stats.accepted = answer.drafted, answer.accepted

    def fail(self, error: str) -> None:
        self.finish_reason, self.error = "error", error

    def fail_without_choice(self, decided: int) -> None:
        """Fails because the logits after `decided` tokens leave no token to choose."""
        first = "logits_processors, then the " if self.settings.logits_processors else ""
        self.fail(NO_CHOICE.format(decided, first))

    def output(self, start: int = 0) -> tuple[list[int], list[str]]:
        """The decided tokens from `start` on, without EOS, and the origin of each."""
        end = self.generated
        return self.tokens[1 + start : 1 + end], self.origins[start:end]

    def chunk(self) -> Chunk:
        """What was added since the last chunk, by a finished piece to its document."""
        if self.document:
            return self.document.add(self.result())
        if self.joined:
            return Chunk("", [], [], [], self.joined.stats, self.joined, self.index)
        tokens, origins = self.output(self.reported)
        segments = self.watch.segments[self.reported :] if self.watch else []
        segments = segments[: len(segments) - self.held]
        text = "".join(segments) + (self.watch.rest if self.watch else "")
        result = self.result() if self.finish_reason else None
        self.stats.update_rates(self.generated, self.decided - self.held)
        # If the end token alone released held-back text, its log-probability is reported.
        logprobs = self.logprobs[: len(tokens) or (1 if text else 0)]
        self.reported, self.logprobs = self.decided - self.held, self.logprobs[len(tokens) :]
        return Chunk(text, tokens, origins, segments, self.stats, result, self.index, logprobs)

    def result(self) -> Result:
        """The result of a finished row."""
        if self.joined:
            return self.joined
        if self.error:
            return Result(None, [], [], "error", self.stats, self.error)
        assert self.finish_reason is not None, "the row is still running"
        tokens, origins = self.output()
        self.stats.update_rates(len(tokens), self.decided)
        self.stats.peak_memory_bytes = mx.get_peak_memory()
        if self.prediction:
            end, speculation = getattr(self.tokenizer, "eos_token_id", None), self.stats.speculation
            expected = [token for token in self.prediction if token != end]
            counts = count_predicted(expected, tokens)
            speculation.predicted, speculation.predicted_accepted = counts
        text = None
        if self.watch:
            text = self.watch.text
        elif self.tokenizer is not None:
            text = decode(self.tokenizer, tokens)
        return Result(text, tokens, origins, self.finish_reason, self.stats, score=self.score)


@dataclass
class PieceResult:
    """The result of one piece of a document: of the characters `start` to `end` of the prompt."""

    start: int
    end: int
    text: str
    finish_reason: str
    error: str | None = None
    looped: bool | None = None  # True if it was decoded in parts, because it ran into a loop


@dataclass
class Result:
    """The result of one prompt.

    Attributes:
        text: the decoded tokens, up to a stop string; None without a tokenizer or for a failed
            prompt. A document whose pieces all fail has its source text.
        tokens: generated ids, without start token and EOS, but with the tokens of a stop string.
        origins: origin of each token: "draft", "copy" (from the source or a prediction) or
            "target".
        finish_reason: "stop" at EOS or a stop string, "length" at max_tokens, "repetition" in a
            loop, "error" if the prompt could not be decoded.
        stats: counts and times.
        error: the error message, if the prompt could not be decoded.
        score: with beams, the sum of the tokens' log-probabilities, EOS included, divided by
            their number to the power of `length_penalty`.
        pieces: the pieces of a document; `tokens` has the tokens of all pieces.
    """

    text: str | None
    tokens: list[int]
    origins: list[str]
    finish_reason: str
    stats: Stats
    error: str | None = None
    score: float | None = None
    pieces: list[PieceResult] = field(default_factory=list)

    def __repr__(self) -> str:
        text = self.text and brief(self.text)
        drafted = f"{self.stats.accepted} of {self.stats.drafted} drafted accepted"
        parts = [repr(text), f"{len(self.tokens)} tokens", f"{self.finish_reason!r}", drafted]
        if self.error:
            parts.append(f"error {self.error!r}")
        return f"Result({', '.join(parts)})"

    @property
    def accepted(self) -> list[bool]:
        """Whether each token was a proposal."""
        return [origin != "target" for origin in self.origins]


@dataclass
class Chunk:
    """The part of a streamed text that one step added, or one piece of a document.

    Attributes:
        text: new text in whole characters; "" without a tokenizer. Text that may begin a stop
            string is held back, as are tokens that may turn out to be copies in a loop.
        tokens: new ids, without EOS.
        origins: origin of each of these tokens, as in `Result`.
        segments: for each of these tokens, the part of `text` that it completed.
        stats: counts and times so far.
        result: the whole result, in the last chunk only.
        index: the text's index among all texts of its request: (index of the prompt) · (texts per
            prompt) + (index among the prompt's texts).
        logprobs: one entry per token if the server reports log-probabilities, else none. A chunk
            that has text but no tokens has one entry: that of the end token.
    """

    text: str
    tokens: list[int]
    origins: list[str]
    segments: list[str]
    stats: Stats
    result: Result | None = None
    index: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __repr__(self) -> str:
        last = ", the last" if self.result else ""
        return f"Chunk({brief(self.text)!r}, {len(self.tokens)} tokens{last})"

    @property
    def accepted(self) -> list[bool]:
        return [origin != "target" for origin in self.origins]


def total(results: Iterable[Result]) -> Stats:
    """The sums of the results' statistics, and the rates of these sums."""
    stats = Stats()
    for result in results:
        stats.add(result.stats)
    return stats
