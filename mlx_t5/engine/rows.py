"""A prompt on its way through the engine: its row, its statistics, its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_t5.drafting.experience import Experience
from mlx_t5.settings import AUTO, Settings

if TYPE_CHECKING:
    from mlx_t5.backend import mx
    from mlx_t5.sampling.beam_search import BeamSearch
    from mlx_t5.text.stop_strings import TextWatch

NO_CHOICE = (
    "the model's logits after {} tokens are NaN, infinite or all forbidden; check the {}weights, "
    "bfloat16 or float32 if they are float16"
)


@dataclass
class Speculation:
    """How proposals fared, for one prompt.

    Attributes:
        copied: those of `drafted` that were copied, from the source or the caller's prediction.
        copied_accepted: those of `accepted` that were.
        predicted: tokens of the caller's prediction that were read beside the finished text.
        predicted_accepted: those of them that are in the text, whoever proposed what.
        steps_by_length: how many steps had 0, 1, … proposals.
        steps_by_accepted: how many steps kept 0, 1, … of them.
        drafted_by_position: how many proposals stood first, second, … in their step.
        accepted_by_position: how many of those were kept.
    """

    copied: int = 0
    copied_accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    steps_by_length: list[int] = field(default_factory=list)
    steps_by_accepted: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)


@dataclass
class Stats:
    """Counts and times of one prompt. Times are in seconds of wall clock.

    A row shares its batch's steps, so `decode_seconds` of rows decoded together
    overlap. Nothing after EOS or `max_tokens` is counted.

    Attributes:
        prompt_tokens: source tokens, EOS included.
        generated_tokens: tokens of the result, EOS not included.
        target_calls: forward passes of the target's decoder.
        drafted: tokens proposed.
        accepted: proposals that are part of the output (EOS may be one).
        acceptance_rate: accepted / drafted, 0 when nothing was drafted.
        tokens_per_call: tokens decided, EOS included, per target call: exactly
            1 in regular decoding.
        encode_seconds: encoding the source with the target; a draft reads it in its first step.
        decode_seconds: all steps this row took part in.
        tokens_per_second: generated_tokens / decode_seconds.
        peak_memory_bytes: most memory MLX held at once during the call.
        speculation: why it was as fast as it was.
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
    speculation: Speculation = field(default_factory=Speculation)

    def count(self, drafted: int, accepted: int, writer: str) -> None:
        """Counts a step in: how many tokens `writer` proposed, and how many were kept."""
        self.target_calls += 1
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
        if writer != "draft":
            speculation.copied += drafted
            speculation.copied_accepted += accepted

    def update_rates(self, generated: int, decided: float) -> None:
        """Works out what follows from the counts, of so many tokens without and with EOS."""
        self.generated_tokens = generated
        self.acceptance_rate = self.accepted / max(self.drafted, 1)
        self.tokens_per_call = decided / max(self.target_calls, 1)
        if self.decode_seconds > 0:
            self.tokens_per_second = generated / self.decode_seconds


@dataclass
class Row:
    """One prompt on its way through the engine.

    Attributes:
        ids: source tokens.
        settings: how to decode it.
        key: (2,) the row's own random key.
        committed: the start token and every token decided so far.
        writers: who wrote each of them after the start token: "draft", "copy" or "target".
        finish_reason: None while running, then "stop", "length" or "error".
        error: what went wrong, if anything did.
        stats: counts and times.
        watch: reads the row's text as it grows, for a stream or for stop strings; None if nobody
            asks for it before the end.
        ended: whether the last token is the end token.
        prediction: of its text, by the caller, to copy proposals from.
        experience: how its proposals fared.
        search: what its beams have found; None if it has none. Until it ends, `committed` is the
            best beam.
        score: of the text that its search has found.
        states: (S, d_model) the target's encoder output, while the row waits; None if it has not
            been encoded.
    """

    ids: list[int]
    settings: Settings
    key: mx.array
    committed: list[int] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    stats: Stats = field(default_factory=Stats)
    watch: TextWatch | None = None
    ended: bool = False
    prediction: Sequence[int] = ()
    experience: Experience = field(default_factory=Experience)
    search: BeamSearch | None = None
    score: float | None = None
    states: mx.array | None = None

    @property
    def adapts(self) -> bool:
        """Whether the number of its proposals may follow what was seen of other rows.

        Not where its text depends on what is proposed.
        """
        settings = self.settings
        return settings.num_draft == AUTO and settings.temp == 0 and settings.delta == 0

    @property
    def decided(self) -> int:
        """Tokens decided so far, EOS included."""
        return len(self.committed) - 1

    @property
    def room(self) -> int:
        """Proposals that the next step can use: one token of a step is the target's own."""
        return self.settings.max_tokens - self.decided - 1

    def commit(
        self, tokens: list[int], drafted: int, writer: str, eos: Sequence[int]
    ) -> tuple[list[int], int]:
        """Adds what a step decided, up to the end of the text.

        Args:
            tokens: the accepted proposals and the target's own token. Where that is negative, for
                none (`acceptance.NO_TOKEN`), a text that they do not end fails.
            drafted: proposals that were verified.
            writer: where they come from: "draft" or "copy".
            eos: the end tokens; what follows one, or a stop string, is dropped and not counted.

        Returns:
            The tokens that count, and how many of them were proposals.
        """
        accepted, finite = len(tokens) - 1, tokens[-1] >= 0
        tokens = tokens[: accepted + finite]
        end = next((i for i, token in enumerate(tokens) if token in eos), None)
        self.ended = end is not None
        if end is not None:
            tokens = tokens[: end + 1]
        if self.watch:
            read = self.watch.take(tokens[: len(tokens) - self.ended])
            if self.watch.stopped:
                tokens, self.ended = tokens[:read], False
        if self.ended or (self.watch and self.watch.stopped):
            drafted, accepted = min(drafted, len(tokens)), min(accepted, len(tokens))
            self.finish_reason = "stop"
        self.committed += tokens
        self.writers += [writer] * accepted + ["target"] * (len(tokens) - accepted)
        if self.finish_reason is None and self.decided >= self.settings.max_tokens:
            self.finish_reason = "length"
        if self.watch and self.finish_reason:
            self.watch.finish()
        self.stats.count(drafted, accepted, writer)
        if not finite and self.finish_reason is None:
            self.fail_without_choice(self.decided)
        return tokens, accepted

    def fail(self, error: str) -> None:
        """Ends the row without a result."""
        self.finish_reason, self.error = "error", error

    def fail_without_choice(self, decided: int) -> None:
        """Ends the row, whose logits after so many tokens leave no token to choose."""
        first = "logits_processors, then the " if self.settings.logits_processors else ""
        self.fail(NO_CHOICE.format(decided, first))

    def output(self, start: int = 0) -> tuple[list[int], list[str]]:
        """Returns the decided tokens from `start` on, without EOS, and who wrote each of them."""
        end = self.decided - self.ended
        return self.committed[1 + start : 1 + end], self.writers[start:end]


@dataclass
class PieceResult:
    """What a piece of a document became.

    Attributes:
        start: where it begins in the text that was given, in characters.
        end: where it ends there.
        text: what stands in its place: the source itself, if it could not be decoded.
        finish_reason: as of `Result`.
        error: likewise.
    """

    start: int
    end: int
    text: str
    finish_reason: str
    error: str | None = None


@dataclass
class Result:
    """What one prompt became.

    Attributes:
        text: the decoded tokens, up to a stop string; None without a tokenizer.
        tokens: generated ids, without start token and EOS, those of a stop string included.
        writers: who wrote each token: "draft", "copy" (from the source or a prediction) or
            "target".
        finish_reason: "stop" at EOS or a stop string, "length" at max_tokens; "error" if the prompt
            could not be decoded, while the others of the call could.
        stats: counts and times.
        error: what went wrong, if anything did.
        score: of a beam search: the sum of the tokens' log-probabilities, EOS included, divided by
            their number to the power of `length_penalty`.
        pieces: of a document that was split, with the tokens of all of them above.
    """

    text: str | None
    tokens: list[int]
    writers: list[str]
    finish_reason: str
    stats: Stats
    error: str | None = None
    score: float | None = None
    pieces: list[PieceResult] = field(default_factory=list)

    @property
    def accepted(self) -> list[bool]:
        """For each token, whether it was a proposal."""
        return [writer != "target" for writer in self.writers]


@dataclass
class Chunk:
    """What one step added to a streamed text.

    Attributes:
        text: new text, whole characters only and nothing that may begin a stop string; ""
            without a tokenizer.
        tokens: new ids, without EOS.
        writers: who wrote each of them, as in `Result`.
        pieces: for each of them, the part of `text` that it completed.
        stats: counts and times so far.
        result: the whole result, in the last chunk only.
    """

    text: str
    tokens: list[int]
    writers: list[str]
    pieces: list[str]
    stats: Stats
    result: Result | None = None

    @property
    def accepted(self) -> list[bool]:
        """For each token, whether it was a proposal."""
        return [writer != "target" for writer in self.writers]
