"""The generation settings, each declared once: type, range, default and help.

`Settings` checks its values by these declarations. The options of the command lines, the fields of
the server's requests, and the settings of a model's own files (checkpoints/generation_config.py)
are derived from `SETTINGS`.

Nothing here imports MLX, so that a command line can check its options before that is loaded.
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
DEFAULT_BATCH_SIZE = 8  # default number of rows decoded, or of items in a pass, at once


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        default: its default value.
        range: its valid values.
        help: one line of help.
        only_with: the mode in which it has an effect; None for all modes.
        config: its names in generation_config.json; a later name overrides an earlier one.
        request: its name in requests to the server; "" if they do not have it.
        flag: the short form of its command line option.
    """

    default: Any
    range: Range
    help: str
    only_with: Literal["sampling", "beams"] | None = None
    config: tuple[str, ...] = ()
    request: str = ""
    flag: str = ""


def declared(default: Any, range: Range, help: str, **others: Any) -> Any:
    """Returns a field of `Settings`; arguments as of `Setting`."""
    return field(default=default, metadata={"setting": Setting(default, range, help, **others)})


@dataclass(frozen=True)
class Settings:
    """How one prompt is decoded.

    Numbers may be NumPy's. Counts above 2**31 - 1 are clamped to it.

    Attributes:
        logits_processors: callables that change the target's logits, in order, after the penalties
            and `min_tokens` and before the temperature; see `processors.LogitsProcessor`.
        stop: a string or several; the text ends before the first of them.

    The other attributes are described where they are declared.

    Raises:
        UserError: a value is of the wrong type, out of range, or incompatible with num_beams.
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
        # The normal numbers of float32.
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
        # However small it is, the likeliest token stays.
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
    num_draft: int | str = declared(
        AUTO,
        counts(0, 'a whole number, 0 (regular decoding) or more, or "auto"', besides=(AUTO,)),
        "tokens proposed at a time; auto: as many as pay",
        request="num_draft",
    )
    repetition_penalty: float = declared(
        1.0,
        # Outside this range logits would become infinite.
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
            if name in OF_A_PROMPT
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
# Also those of a whole call: arguments of `generate` that `Settings` does not have.
SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        **OF_A_PROMPT,
        "batch_size": Setting(DEFAULT_BATCH_SIZE, BATCH_SIZE, "prompts decoded at the same time"),
        "num_samples": Setting(1, NUM_SAMPLES, "texts a prompt; needs --temp above 0"),
        "seed": Setting(0, SEED, "of sampling; the same seed, the same text", only_with="sampling"),
    }
)


def check_exact(settings: Settings, width: int) -> None:
    """Refuses settings that exact decoding does not support in passes of this width.

    Raises:
        UserError: num_draft does not fit into the width, or delta or beams are used.
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
    """Returns the items of an iterable as a tuple; refuses it unless every item fits."""
    items = listed(values)
    if items is None or not all(map(fits, items)):
        raise refusal(name, values if items is None else items, expected)
    return tuple(items)
