"""The generation settings, each declared once: type, range, default, and what it does.

`Settings` checks itself by these declarations. From `SETTINGS` follow the options of the command
lines, the fields of the server's requests, and what a model's own files may set
(checkpoints/generation_config.py).

Nothing here imports MLX, so that a command line can check its options before it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mlx_t5.errors import UserError
from mlx_t5.ranges import (
    BATCH_SIZE,
    LARGEST,
    LARGEST_FACTOR,
    MAX_ROWS,
    NUM_SAMPLES,
    OFF_OR_MORE,
    POSITIVE,
    SEED,
    SMALLEST,
    Range,
    checked,
    counts,
    listed,
    refusal,
)

if TYPE_CHECKING:
    from mlx_t5.sampling.processors import LogitsProcessor

SPLITS = ("none", "lines", "sentences")  # how a document is cut
AUTO = "auto"  # in place of a number of proposals
DEFAULT_BATCH_SIZE = 8  # rows decoded, or items of a pass, at once where the caller names no number


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        default: where nobody says otherwise.
        range: what it may be.
        help: what it does.
        default_help: the default in words, where its value does not say it.
        only_with: what else has to be asked for; the setting has no effect otherwise.
        config: its names in generation_config.json, of which a later one overrides an earlier.
        request: its name in the requests to the server; "" keeps it out of them.
        flag: a second, short name of its option on a command line.
    """

    default: Any
    range: Range
    help: str
    default_help: str = ""
    only_with: Literal["sampling", "beams"] | None = None
    config: tuple[str, ...] = ()
    request: str = ""
    flag: str = ""


def declared(default: Any, range: Range, help: str, **others: Any) -> Any:
    """A field of `Settings`; arguments as of `Setting`."""
    return field(default=default, metadata={"setting": Setting(default, range, help, **others)})


@dataclass(frozen=True)
class Settings:
    """How one prompt is decoded.

    Numbers may be NumPy's. A whole number above 2**31 - 1 means no more than that, and becomes it.

    Attributes:
        logits_processors: callables that change the target's logits, in order, after the penalties
            and `min_tokens` and before the temperature; see `processors.LogitsProcessor`.
        stop: a string or several; the text ends before the first of them.

    The others say themselves what they do.

    Raises:
        UserError: a value is of the wrong kind or out of its range, or does not go with num_beams.
    """

    max_tokens: int = declared(
        256,
        POSITIVE,
        "most tokens of a text, its end token included",
        config=("max_length", "max_new_tokens"),
        request="max_tokens",
        flag="-m",
    )
    temp: float = declared(
        0.0,
        # What float32 does not hold is refused.
        Range(float, SMALLEST, LARGEST, "0 (greedy), or a number from 1.2e-38 to 3.4e38", (0,)),
        "temperature; 0 decodes greedily",
        request="temperature",
    )
    top_k: int = declared(
        0,
        OFF_OR_MORE,
        "sample from the k likeliest tokens; 0: all",
        only_with="sampling",
        config=("top_k",),
    )
    top_p: float = declared(
        1.0,
        # However small, it leaves the likeliest token.
        Range(float, math.ulp(0.0), 1, "a number above 0 and at most 1 (off)", floor=SMALLEST),
        "sample from the likeliest tokens of this mass",
        only_with="sampling",
        config=("top_p",),
        request="top_p",
    )
    min_p: float = declared(
        0.0,
        Range(float, 0, 1, "a number from 0 (off) to 1"),
        "sample from tokens with at least this part of the likeliest one's probability; 0: off",
        only_with="sampling",
        config=("min_p",),
        request="min_p",
    )
    delta: float = declared(
        0.0,
        Range(float, 0, 1, "a number from 0 (lossless) to 1"),
        "leniency: 0 is lossless, 1 keeps all proposals",
        request="delta",
    )
    num_draft: int | str | None = declared(
        None,  # the decoder's number
        counts(0, 'a whole number, 0 (regular decoding) or more, or "auto"', besides=(AUTO,)),
        "tokens proposed at a time; auto: as many as pay",
        default_help=AUTO,
        request="num_draft",
    )
    repetition_penalty: float = declared(
        1.0,
        # Beyond, it makes logits infinite.
        Range(float, 1 / LARGEST_FACTOR, LARGEST_FACTOR, "a number from 1e-30 to 1e30 (1 is off)"),
        "above 1 makes repeated tokens less likely; 1: off",
        config=("repetition_penalty",),
    )
    no_repeat_ngram_size: int = declared(
        0,
        OFF_OR_MORE,
        "write no run of so many tokens twice; 0: off",
        config=("no_repeat_ngram_size",),
    )
    min_tokens: int = declared(
        0,
        OFF_OR_MORE,
        "no end before so many tokens; 0: off",
        config=("min_length", "min_new_tokens"),
    )
    logits_processors: Iterable[LogitsProcessor] = ()
    stop: str | Iterable[str] = ()
    num_beams: int = declared(
        1,
        Range(int, 1, MAX_ROWS, f"a whole number from 1 (no search) to {MAX_ROWS}"),
        "beams, searched without a draft; 1: no search",
        config=("num_beams",),
        request="num_beams",
    )
    length_penalty: float = declared(
        1.0,
        Range(float, -10, 10, "a number from -10 to 10"),
        "of beams: above 0 favours long texts, below 0 short ones",
        only_with="beams",
        config=("length_penalty",),
        request="length_penalty",
    )
    early_stopping: bool | str = declared(
        False,
        Range(bool, 0, 1, 'True, False or "never"', besides=("never",)),
        "of beams: end with as many texts as beams (true), or once none is likely (false) or "
        "able (never) to improve",
        only_with="beams",
        config=("early_stopping",),
        request="early_stopping",
    )
    num_return_sequences: int = declared(
        1, POSITIVE, "texts a prompt, the best of its beams", only_with="beams"
    )

    def __post_init__(self) -> None:
        fitting = {
            name: checked(name, value, OF_A_PROMPT[name].range)
            for name, value in vars(self).items()
            if name in OF_A_PROMPT and not (name == "num_draft" and value is None)
        }
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
            requested = f"num_return_sequences is {self.num_return_sequences} and {beams}"
            raise UserError(f"{requested}; it must be num_beams at most")
        if self.num_beams > 1 and self.temp > 0:
            raise UserError(f"{beams} and temp {self.temp}: beams do not sample; set one of them")
        if self.num_beams > 1 and self.delta > 0:
            raise UserError(f"{beams} and delta {self.delta}: nothing is drafted; set one of them")


OF_A_PROMPT: Mapping[str, Setting] = MappingProxyType(
    {f.name: f.metadata["setting"] for f in fields(Settings) if "setting" in f.metadata}
)
# And of a whole call: arguments of `generate` beside those of `Settings`.
SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        **OF_A_PROMPT,
        "batch_size": Setting(DEFAULT_BATCH_SIZE, BATCH_SIZE, "prompts decoded at the same time"),
        "num_samples": Setting(1, NUM_SAMPLES, "texts a prompt; needs --temp above 0"),
        "seed": Setting(0, SEED, "of sampling; the same seed, the same text", only_with="sampling"),
    }
)


def check_exact(settings: Settings, width: int) -> None:
    """Refuses what exact decoding cannot do in passes of this width.

    Raises:
        UserError: there are more proposals than have room, they are to decide about the text, or
            beams are searched.
    """
    fixed = settings.num_draft if isinstance(settings.num_draft, int) else 0
    for name, refused, cause in (
        ("num_draft", fixed >= width, f"has room for {width - 1} here, so lower it"),
        ("num_beams", settings.num_beams > 1, "has no beams; leave one out"),
        ("delta", settings.delta > 0, "needs 0, as the draft would decide about the text"),
    ):
        if refused:
            raise UserError(f"{name} is {getattr(settings, name)}; exact decoding {cause}")


def _several(name: str, values: Any, fits: Callable[[Any], bool], expected: str) -> tuple:
    """What an iterable holds, if every item of it fits."""
    items = listed(values)
    if items is None or not all(map(fits, items)):
        raise refusal(name, values if items is None else items, expected)
    return tuple(items)
