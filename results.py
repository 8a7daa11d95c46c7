"""A prompt on its way: its settings, its row in the engine, its result and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend import mx
from pace import Pace
from processors import LogitsProcessor, Processing
from ranges import RANGES, checked, listed, refusal
from sampling import Sampling
from stop_strings import TextWatch


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
            choose for every step.
        repetition_penalty: above 1 makes tokens already written less likely; 1 is off. Below 1e-30
            or above 1e30, where it makes logits infinite, it is refused.
        no_repeat_ngram_size: no run of so many tokens is written twice; 0 is off.
        min_tokens: tokens before the end token may come; 0 is off.
        logits_processors: callables that change the target's logits, in order, after the three
            above and before the temperature; see `processors.LogitsProcessor`.
        stop: a string or several; the text ends before the first of them.
        block_verification: where it samples without relaxation, judge the proposals of a step
            together; False judges them one by one. The distribution is the same.

    Raises:
        UserError: a value is of the wrong kind or out of its range (ranges.py).
    """

    max_tokens: int = 256
    temp: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    delta: float = 0.0
    num_draft: int | str = 5
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    logits_processors: Iterable[LogitsProcessor] = ()
    stop: str | Iterable[str] = ()
    block_verification: bool = True

    def __post_init__(self) -> None:
        fitting = {n: checked(n, v) for n, v in vars(self).items() if n in RANGES}
        fitting["stop"] = _several(
            "stop",
            [self.stop] if isinstance(self.stop, str) else self.stop,
            lambda text: isinstance(text, str) and text,
            "a string or several, of at least one character each",
        )
        fitting["logits_processors"] = _several(
            "logits_processors", self.logits_processors, callable, "a list of callables"
        )
        for name, value in fitting.items():
            object.__setattr__(self, name, value)


def _several(name: str, values: Any, fits: Callable[[Any], bool], expected: str) -> tuple:
    """What an iterable holds, if each of it fits."""
    items = listed(values)
    if items is None or not all(map(fits, items)):
        raise refusal(name, values if items is None else items, expected)
    return tuple(items)


@dataclass
class Speculation:
    """Why speculation was as fast as it was, for one prompt.

    What depends on costs is None where they are unknown: they are measured for "auto" only.

    Attributes:
        copied: those of `drafted` that were copied from the source, by no model.
        copied_accepted: those of `accepted` that were.
        steps_by_length: how many steps had 0, 1, … proposals.
        drafted_by_position: how many proposals stood first, second, … in their step.
        accepted_by_position: how many of those were kept.
        acceptance_by_position: their ratio.
        alpha: probability that a proposal is kept given that all before it were, by kind of
            proposal ("draft", "copy", "weak copy", "first copy"), estimated from the last ones;
            copies count whether they were proposed or would only have been right.
        c: cost of a draft pass relative to a regular step of the target.
        verify_cost: cost of verifying, v(gamma + 1) / v(1), on average over the steps.
        predicted_speedup: over regular decoding, from alpha and the costs, step by step.
        real_speedup: the same from the time that the steps took; a regular step is taken
            to take what it took in the calibration.
        switched_off: one line on why there were no proposals at the end; None if there were.
    """

    copied: int = 0
    copied_accepted: int = 0
    steps_by_length: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    acceptance_by_position: list[float] = field(default_factory=list)
    alpha: dict[str, float] = field(default_factory=dict)
    c: float | None = None
    verify_cost: float | None = None
    predicted_speedup: float | None = None
    real_speedup: float | None = None
    switched_off: str | None = None

    def count(self, drafted: int, accepted: int, writer: str) -> None:
        """Counts one step's proposals."""
        _count(self.steps_by_length, drafted + 1, [drafted])
        _count(self.drafted_by_position, drafted, range(drafted))
        _count(self.accepted_by_position, drafted, range(accepted))
        if writer == "copy":
            self.copied += drafted
            self.copied_accepted += accepted

    def explain(self, pace: Pace, tokens_per_call: float, decode_seconds: float) -> None:
        """Works out what follows from the counts and from what the row has learned."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        self.acceptance_by_position = [kept / drafted for kept, drafted in pairs]
        self.alpha = {kind: e.kept / e.judged for kind, e in pace.estimates.items()}
        self.switched_off = pace.off
        if pace.steps:
            self.c, self.verify_cost = pace.c / pace.steps, pace.verify / pace.steps
            self.predicted_speedup = pace.promised / pace.spent
            if decode_seconds > 0:
                self.real_speedup = tokens_per_call * pace.regular / decode_seconds


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
        pace: what was learned about its proposals.
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
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self.pace.sampled = self.settings.temp > 0

    @property
    def decided(self) -> int:
        """Tokens decided so far, EOS included."""
        return len(self.committed) - 1

    def commit(
        self, tokens: list[int], drafted: int, accepted: int, writer: str, eos: Sequence[int]
    ) -> tuple[list[int], int, bool]:
        """Takes over what a step decided.

        Args:
            tokens: the accepted proposals and the target's own token.
            drafted: proposals that were judged.
            accepted: how many of them were kept.
            writer: who proposed them.
            eos: the end tokens; what follows the first, or a stop string, is dropped and not
                counted.

        Returns:
            The tokens that count, how many of them were proposals, and whether the text ended.
        """
        end = next((i for i, token in enumerate(tokens) if token in eos), None)
        self.ended = end is not None
        if self.ended:
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
        self.stats.target_calls += 1
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        self.stats.speculation.count(drafted, accepted, writer)
        return tokens, accepted, self.finish_reason == "stop"

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
        stats.speculation.explain(self.pace, stats.tokens_per_call, stats.decode_seconds)

    def output(self, start: int = 0) -> tuple[list[int], list[str]]:
        """Decided tokens from `start` on, without EOS, and who wrote each."""
        end = self.decided - self.ended
        return self.committed[1 + start : 1 + end], self.writers[start:end]


def sampling_of(rows: Sequence[Row], eos: Sequence[int]) -> Sampling:
    """The settings of a batch's rows, collected for a step."""

    def each(*names: str) -> list[list]:
        return [[getattr(row.settings, name) for row in rows] for name in names]

    rules = ("repetition_penalty", "no_repeat_ngram_size", "min_tokens", "logits_processors")
    processing = Processing.of(*each(*rules), eos)
    sampled = each("temp", "top_k", "top_p", "delta", "block_verification")
    return Sampling.of(*sampled, processing=processing)


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
    """

    text: str | None
    tokens: list[int]
    writers: list[str]
    finish_reason: str
    stats: Stats
    error: str | None = None

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
