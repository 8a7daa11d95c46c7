"""A prompt on its way: its settings, its row in the engine, its result and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_t5.errors import UserError
from mlx_t5.ranges import RANGES, checked, listed, refusal

if TYPE_CHECKING:
    from mlx_t5.backend import mx
    from mlx_t5.sampling.beams import BeamSearch
    from mlx_t5.sampling.processors import LogitsProcessor
    from mlx_t5.text.stop_strings import TextWatch

AUTO = "auto"  # in place of a number of proposals
# Proposals where nobody says how many. On Apple GPUs a pass over 5 rows reads the weights once and
# one over 6 twice (docs/speculation.md); on CPUs there is no such step.
NUM_DRAFT_ON_GPU, NUM_DRAFT_ON_CPU = 4, 5


@dataclass(frozen=True)
class Settings:
    """How one prompt is decoded.

    Numbers may be NumPy's. A whole number above 2**31 - 1 means no more than that, and becomes it.

    Attributes:
        max_tokens: generated tokens at most, EOS included.
        temp: temperature; 0 is greedy, and what float32 does not hold (below 1.2e-38 or above
            3.4e38) is refused.
        top_k: sample among this many likeliest tokens; 0 is off.
        top_p: sample among the likeliest tokens that reach this mass; 1 is off. However small, it
            leaves the likeliest.
        delta: relaxation of the acceptance rule, 0 (lossless) to 1 (keep all).
        num_draft: tokens proposed a step (gamma); 0 decodes regularly, "auto" lets the engine
            choose for every step, None takes the decoder's number, or the device's.
        repetition_penalty: above 1 makes tokens already written less likely; 1 is off. Below 1e-30
            or above 1e30, where it makes logits infinite, it is refused.
        no_repeat_ngram_size: no run of so many tokens is written twice; 0 is off.
        min_tokens: tokens before the end token may come; 0 is off.
        logits_processors: callables that change the target's logits, in order, after the three
            above and before the temperature; see `processors.LogitsProcessor`.
        stop: a string or several; the text ends before the first of them.
        num_beams: hypotheses of a beam search, which drafts and samples nothing; 1 is none.
        length_penalty: beams are ranked by log-probability / length**length_penalty.
        early_stopping: when a search ends, as in transformers: True, False or "never".
        num_return_sequences: texts a prompt, the best of its search.

    Raises:
        UserError: a value is of the wrong kind or out of its range (ranges.py), or does not go
            with num_beams.
    """

    max_tokens: int = 256
    temp: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    delta: float = 0.0
    num_draft: int | str | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    logits_processors: Iterable[LogitsProcessor] = ()
    stop: str | Iterable[str] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        absent = {"num_draft"} if self.num_draft is None else set()
        fitting = {n: checked(n, v) for n, v in vars(self).items() if n in RANGES.keys() - absent}
        fitting["stop"] = _several(
            "stop",
            [self.stop] if isinstance(self.stop, str) else self.stop,
            lambda text: isinstance(text, str) and text != "",
            "a string or several, of at least one character each",
        )
        fitting["logits_processors"] = _several(
            "logits_processors", self.logits_processors, callable, "a list of callables"
        )
        for name, value in fitting.items():
            object.__setattr__(self, name, value)
        self._check_beams()

    def _check_beams(self) -> None:
        beams = f"num_beams is {self.num_beams}"
        if self.num_return_sequences > self.num_beams:
            wanted = f"num_return_sequences is {self.num_return_sequences} and {beams}"
            raise UserError(f"{wanted}; it must be num_beams at most")
        if self.num_beams > 1 and self.temp > 0:
            raise UserError(f"{beams} and temp {self.temp}: beams do not sample; set one of them")
        if self.num_beams > 1 and self.delta > 0:
            raise UserError(f"{beams} and delta {self.delta}: nothing is drafted; set one of them")


def check_exact(settings: Settings, width: int) -> None:
    """Refuses what exact decoding cannot do in passes of this width.

    Raises:
        UserError: there are more proposals than have room, they are to decide about the text, or
            beams are searched.
    """
    if isinstance(settings.num_draft, int) and settings.num_draft >= width:
        raise UserError(
            f"num_draft is {settings.num_draft}; exact decoding has room for {width - 1} here, so "
            "lower it"
        )
    if settings.num_beams > 1:
        raise UserError(
            f"num_beams is {settings.num_beams}; exact decoding has no beams; leave one out"
        )
    if settings.delta:
        raise UserError(
            f"delta is {settings.delta:g}, which lets the draft decide about the text; exact "
            "decoding needs 0"
        )


def _several(name: str, values: Any, fits: Callable[[Any], bool], expected: str) -> tuple:
    """What an iterable holds, if each of it fits."""
    items = listed(values)
    if items is None or not all(map(fits, items)):
        raise refusal(name, values if items is None else items, expected)
    return tuple(items)


@dataclass
class Speculation:
    """How proposals fared, for one prompt.

    Attributes:
        copied: those of `drafted` that were copied from the source, by no model.
        copied_accepted: those of `accepted` that were.
        steps_by_length: how many steps had 0, 1, … proposals.
        steps_by_accepted: how many steps kept 0, 1, … of them.
        drafted_by_position: how many proposals stood first, second, … in their step.
        accepted_by_position: how many of those were kept.
    """

    copied: int = 0
    copied_accepted: int = 0
    steps_by_length: list[int] = field(default_factory=list)
    steps_by_accepted: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int, writer: str) -> None:
        """Counts one step's proposals."""
        _count(self.steps_by_length, drafted + 1, [drafted])
        _count(self.steps_by_accepted, accepted + 1, [accepted])
        _count(self.drafted_by_position, drafted, range(drafted))
        _count(self.accepted_by_position, drafted, range(accepted))
        if writer == "copy":
            self.copied += drafted
            self.copied_accepted += accepted


def _count(counts: list[int], size: int, places: Iterable[int]) -> None:
    """Adds one at these places of a list that has at least `size` entries afterwards."""
    counts += [0] * (size - len(counts))
    for place in places:
        counts[place] += 1


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
        encode_seconds: encoding the source, with target and draft.
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
        self.speculation.count(drafted, accepted, writer)


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
        task: the tokens of its task prefix, () without one.
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
    task: tuple[int, ...] = ()
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

    def fail(self, error: str) -> None:
        """Ends the row without a result."""
        self.finish_reason, self.error = "error", error

    def update_rates(self) -> None:
        """Works out the statistics that follow from the counts."""
        stats = self.stats
        stats.generated_tokens = len(self.output()[0])
        stats.acceptance_rate = stats.accepted / max(stats.drafted, 1)
        stats.tokens_per_call = self.decided / max(stats.target_calls, 1)
        if stats.decode_seconds > 0:
            stats.tokens_per_second = stats.generated_tokens / stats.decode_seconds

    def output(self, start: int = 0) -> tuple[list[int], list[str]]:
        """Returns the decided tokens from `start` on, without EOS, and who wrote each of them."""
        end = self.decided - self.ended
        return self.committed[1 + start : 1 + end], self.writers[start:end]


@dataclass
class Result:
    """What one prompt became.

    Attributes:
        text: the decoded tokens, up to a stop string; None without a tokenizer.
        tokens: generated ids, without start token and EOS, those of a stop string included.
        writers: who wrote each token: "draft", "copy" (from the source) or "target".
        finish_reason: "stop" at EOS or a stop string, "length" at max_tokens; "error" if the prompt
            could not be decoded, while the others of the call could.
        stats: counts and times.
        error: what went wrong, if anything did.
        score: of a beam search: the sum of the tokens' log-probabilities, EOS included, divided by
            their number to the power of `length_penalty`.
    """

    text: str | None
    tokens: list[int]
    writers: list[str]
    finish_reason: str
    stats: Stats
    error: str | None = None
    score: float | None = None

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
