"""How a prompt is decoded: its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_t5.errors import UserError
from mlx_t5.ranges import RANGES, checked, listed, refusal

if TYPE_CHECKING:
    from mlx_t5.sampling.processors import LogitsProcessor

AUTO = "auto"  # in place of a number of proposals
# Proposals where nobody says how many. On Apple GPUs a pass over 5 rows reads the weights once and
# one over 6 twice (docs/choosing.md); on CPUs there is no such step.
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
