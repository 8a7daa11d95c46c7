"""Declares each generation setting once: its type, range, default and help.

`Settings` checks its values by these declarations. The options of the command lines, the fields of
the server's requests, and the settings of a model's own files (checkpoints/generation_config.py)
are derived from `SETTINGS`.

Nothing here imports MLX, so that a command line can check its options before MLX is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mlx_t5.errors import UserError, brief

if TYPE_CHECKING:
    from mlx_t5.sampling.processors import LogitsProcessor

DTYPES = ("float32", "float16", "bfloat16")  # types of weights, by MLX's names
SPLITS = ("none", "lines", "sentences")  # ways to cut a document
SUBTITLES = (".srt", ".vtt")
FILE_TYPES = (".txt", *SUBTITLES)  # of documents
READABLE = "plain text (.txt), SubRip (.srt) or WebVTT (.vtt)"
# Files whose markup would be decoded as words; a file of any other name is plain text.
UNREADABLE = tuple(
    ".md .mdx .markdown .mdown .rst .tex .html .htm .xhtml .xml .json .po .ass .ssa .sbv .ttml "
    ".dfxp .smi .sub .lrc .docx .odt .pdf .epub .rtf".split()
)
# num_draft: the engine chooses the number; as a draft's name: the target's default draft
AUTO = "auto"
NONE = "none"  # as a draft's name: no draft
DEFAULT_BATCH_SIZE = 8  # rows decoded at the same time, or items in one pass


# The normal numbers of float32. Smaller numbers lose digits, and GPUs replace them by 0.
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# The settings that name tokens, and all that are sequences.
TOKEN_RULES = ("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens")
SEQUENCES = (*TOKEN_RULES, "logits_processors", "stop")
# Factors from 1 / LARGEST_FACTOR to LARGEST_FACTOR never make a logit infinite.
LARGEST_FACTOR = 1e30
LARGEST_COUNT = 2**31 - 1  # the largest int32, more than any number of tokens or ids
MAX_ROWS = 1024  # rows decoded at the same time; more make steps slower, and rows start later
VALUE_CHARACTERS = 60  # characters of a value in an error


@dataclass(frozen=True)
class Range:
    """The valid values of a setting."""

    kind: type  # int, float or bool; ints are valid floats, but a bool is never a number
    least: float
    most: float
    expected: str  # the end of the error message, after "it must be"
    besides: tuple[Any, ...] = ()  # further valid values, outside this range
    floor: float = -math.inf  # valid values below are raised to it
    ceiling: float = math.inf  # valid values above are lowered to it

    def fit(self, value: Any) -> Any:
        """The value as a plain Python value of `kind`, clamped; None if it is not valid."""
        if getattr(value, "ndim", None) == 0:  # a NumPy or MLX scalar
            value = value.item()
        if isinstance(value, str):
            return value if value in self.besides else None
        if isinstance(value, bool) or self.kind is bool:
            return value if isinstance(value, bool) and self.kind is bool else None
        numbers: Any = Integral if self.kind is int else Real
        if not isinstance(value, numbers):
            return None
        if not self.least <= value <= self.most:
            return self.kind(value) if value in self.besides else None
        return self.kind(min(max(self.kind(value), self.floor), self.ceiling))

    def holds(self, value: Any) -> bool:
        return self.fit(value) is not None


def count_range(least: int, expected: str, ceiling: float = LARGEST_COUNT, **more: Any) -> Range:
    return Range(int, least, math.inf, expected, ceiling=ceiling, **more)


FLAG = Range(bool, 0, 1, "True or False")
POSITIVE = count_range(1, "a whole number, at least 1")
IDS = "a token id or a list of those"
OFF_OR_MORE = count_range(0, "a whole number, 0 (off) or more")


def checked(name: str, value: Any, allowed: Range | None = None) -> Any:
    """A valid value as a plain Python value; `allowed` is by default the setting's own range."""
    allowed = allowed or SETTINGS[name].range
    fitting = allowed.fit(value)
    if fitting is None:
        raise refusal(name, value, allowed.expected)
    return fitting


def refusal(name: str, value: Any, expected: str) -> UserError:
    return UserError(f"{name} is {written(value)}; it must be {expected}")


def written(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # such as an integer with too many digits for Python to print
        text = f"too large an {type(value).__name__} to be shown"
    return brief(text, VALUE_CHARACTERS)


def is_listlike(value: Any) -> bool:
    """Whether a value is an iterable, but not a string, bytes, dict or 0-dimensional array."""
    single = isinstance(value, (str, bytes, bytearray, Mapping))
    return isinstance(value, Iterable) and not single and getattr(value, "ndim", 1) > 0


def to_list(value: Any) -> list | None:
    """An iterable's items as a list; None if the value is not list-like."""
    if not is_listlike(value):
        return None
    return value.tolist() if hasattr(value, "tolist") else list(value)


@dataclass(frozen=True)
class Repetition:
    """Ends a text in a loop, with vLLM's names and defaults; false if it is off.

    A text ends as soon as its last tokens are `min_count` copies of a pattern. One copy stays.

    Attributes:
        max_pattern_size: maximum number of tokens in a pattern; 0: off.
        min_pattern_size: minimum number of tokens in a pattern; 0 stands for 1.
        min_count: number of copies, at least 2 unless off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, checked(name, value, OFF_OR_MORE))
        if self.min_pattern_size > self.max_pattern_size:
            most = f"max_pattern_size ({self.max_pattern_size}) at most"
            raise refusal("min_pattern_size", self.min_pattern_size, most)
        if self and self.min_count < 2:
            raise refusal("min_count", self.min_count, "2 or more")

    def __bool__(self) -> bool:
        return self.max_pattern_size > 0

    def sizes(self, tokens: int) -> range:
        """The sizes of patterns that so many tokens may have, the smallest first."""
        return range(max(self.min_pattern_size, 1), min(self.max_pattern_size, tokens) + 1)

    @classmethod
    def of(cls, value: Any) -> Repetition:
        """The detection that a mapping describes; None and 0 are off."""
        if isinstance(value, cls):
            return value
        try:
            return cls(**(value or {}))
        except TypeError:
            expected = f"None or an object of {', '.join(vars(cls()))}"
            raise refusal("repetition_detection", value, expected) from None


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting."""

    default: Any
    range: Range
    help: str
    only_with: Literal["sampling", "beams"] | None = None  # no effect in other modes
    config: tuple[str, ...] = ()  # names in generation_config.json; the last one present counts
    request: str | None = None  # name in the server's requests if it differs; "" if they lack it
    flag: str = ""  # the short form of its command line option
    group: str = "text"  # the heading of its option in the help


def declared(default: Any, range: Range, help: str, **attributes: Any) -> Any:
    """A field for `Settings`, with a `Setting` of these arguments as metadata."""
    return field(default=default, metadata={"setting": Setting(default, range, help, **attributes)})


@dataclass(frozen=True)
class Settings:
    """The settings with which one prompt is decoded.

    NumPy's numbers are accepted. Counts above 2**31 - 1 are lowered to that. `num_beams` is
    refused above 1024.

    Attributes:
        logits_processors: callables that change the target's logits, in order, after the penalties
            and `min_tokens` and before the temperature; see `processors.LogitsProcessor`.
        bad_words_ids, suppress_tokens: sequences of tokens and tokens that are never written.
        forced_bos_token_id, forced_eos_token_id: the first token, and the token that `max_tokens`
            allows last; an id or several to choose from. These four work as in transformers.
        stop: one or more strings; the text ends before the first occurrence of any of them.
        repetition_detection: ends a text in a loop; a mapping of vLLM's names, or None for off.

    The other attributes are described by the help in their declarations.

    Raises:
        UserError: a value is of the wrong type, out of range, or incompatible with num_beams.
    """

    max_tokens: int = declared(
        256,
        POSITIVE,
        "maximum number of tokens in a text, its end token included",
        config=("max_length", "max_new_tokens"),
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
        # Even the smallest value keeps the likeliest token.
        Range(float, math.ulp(0.0), 1, "a number above 0 and at most 1 (off)", floor=SMALLEST),
        "sample from the likeliest tokens that have this total probability",
        only_with="sampling",
        config=("top_p",),
    )
    min_p: float = declared(
        0.0,
        Range(float, 0, 1, "a number from 0 (off) to 1"),
        "sample from tokens with at least this part of the likeliest one's probability; 0: off",
        only_with="sampling",
        config=("min_p",),
    )
    num_draft: int | str = declared(
        AUTO,
        count_range(0, 'a whole number, 0 (regular decoding) or more, or "auto"', besides=(AUTO,)),
        "tokens proposed at a time; auto: chosen for speed",
        group="speed",
    )
    delta: float = declared(
        0.0,
        Range(float, 0, 1, "a number from 0 (lossless) to 1"),
        "leniency: 0 is lossless, 1 keeps all proposals",
        group="speed",
    )
    repetition_penalty: float = declared(
        1.0,
        # Factors outside this range could make logits infinite.
        Range(float, 1 / LARGEST_FACTOR, LARGEST_FACTOR, "a number from 1e-30 to 1e30 (1 is off)"),
        "above 1 makes repeated tokens less likely; 1: off",
        config=("repetition_penalty",),
    )
    no_repeat_ngram_size: int = declared(
        0,
        OFF_OR_MORE,
        "write no run of this many tokens twice; 0: off",
        config=("no_repeat_ngram_size",),
    )
    min_tokens: int = declared(
        0,
        OFF_OR_MORE,
        "do not end a text before this many tokens; 0: off",
        config=("min_length", "min_new_tokens"),
    )
    logits_processors: Iterable[LogitsProcessor] = ()
    bad_words_ids: Iterable[Iterable[int]] | None = None
    suppress_tokens: int | Iterable[int] | None = None
    forced_bos_token_id: int | Iterable[int] | None = None
    forced_eos_token_id: int | Iterable[int] | None = None
    stop: str | Iterable[str] = ()
    repetition_detection: Repetition = Repetition()
    # What translations use if it is not given, without beams.
    TRANSLATING: ClassVar[Mapping[str, Any]] = {"repetition_detection": Repetition(16, 1, 4)}
    num_beams: int = declared(
        1,
        Range(int, 1, MAX_ROWS, f"a whole number from 1 (no search) to {MAX_ROWS}"),
        "number of beams, searched without a draft; 1: no search",
    )
    length_penalty: float = declared(
        1.0,
        Range(float, -10, 10, "a number from -10 to 10"),
        "with beams: above 0 favors long texts, below 0 short ones",
        only_with="beams",
    )
    early_stopping: bool | str = declared(
        False,
        Range(bool, 0, 1, 'True, False or "never"', besides=("never",)),
        "with beams: end when num_beams texts are complete (true), when a better one is unlikely "
        "(false), or when it is impossible (never)",
        only_with="beams",
    )
    num_return_sequences: int = declared(
        1, POSITIVE, "texts per prompt, from its best beams", only_with="beams", request=""
    )

    def __post_init__(self) -> None:
        for name in OF_A_PROMPT:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        for name in SEQUENCES:
            value = getattr(self, name)
            # The defaults, () and None, need no check.
            items = () if value is getattr(Settings, name) else _sequence(name, value)
            object.__setattr__(self, name, items)
        if not isinstance(self.repetition_detection, Repetition):
            detection = Repetition.of(self.repetition_detection)
            object.__setattr__(self, "repetition_detection", detection)
        if self.num_return_sequences > self.num_beams:
            expected = f"num_beams ({self.num_beams}) at most"
            raise refusal("num_return_sequences", self.num_return_sequences, expected)
        # A search neither samples nor drafts, and has beams that loop beside others that do not.
        for name in ("temp", "delta", "repetition_detection"):
            if self.num_beams > 1 and getattr(self, name):
                raise UserError(f"num_beams cannot be combined with {name}")

    @cached_property
    def processes_logits(self) -> bool:
        """Whether any of the settings changes logits before a token is chosen."""
        rules = "no_repeat_ngram_size", "min_tokens", "logits_processors", *TOKEN_RULES
        return self.repetition_penalty != 1 or any(getattr(self, name) for name in rules)


OF_A_PROMPT: Mapping[str, Setting] = {
    f.name: replace(setting, request=f.name if setting.request is None else setting.request)
    for f in fields(Settings)
    if (setting := f.metadata.get("setting"))
}
# The settings of a prompt, and the arguments of `generate` that concern a whole call.
SETTINGS: Mapping[str, Setting] = {
    **OF_A_PROMPT,
    "batch_size": Setting(
        DEFAULT_BATCH_SIZE,
        count_range(1, POSITIVE.expected, ceiling=MAX_ROWS),
        "prompts decoded at the same time",
        group="speed",
    ),
    "num_samples": Setting(
        1,
        count_range(1, POSITIVE.expected, ceiling=math.inf),
        "texts per prompt, with --temp above 0",
    ),
    "seed": Setting(
        0,
        Range(int, 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1"),
        "the same seed gives the same text",
        only_with="sampling",
    ),
}

# The names that mlx-lm and transformers have for what has another name here.
_SAME = (
    "p=prompt temperature=temp max_new_tokens=max_tokens min_new_tokens=min_tokens hf_path=model "
    "num_draft_tokens=num_draft num_assistant_tokens=num_draft assistant_model=draft_model "
    "model_name_or_path=model train_file=data validation_file=valid output_dir=output "
    "lr=learning_rate max_steps=iters per_device_train_batch_size=batch_size lora_rank=r rank=r"
)
ALIASES = dict(pair.split("=") for pair in _SAME.split())


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A question that names what was probably meant; "" if nothing is near."""
    from difflib import get_close_matches  # late, as it is rarely needed

    near = get_close_matches(name, known, n=1, cutoff=0.7)
    if ALIASES.get(name) in known:
        near = [ALIASES[name]]
    return f"; did you mean {near[0]}?" if near else ""


def unexpected(name: str) -> TypeError:
    """Python's error for an argument that is not a setting, with the one that may be meant."""
    question = did_you_mean(name, [*(field.name for field in fields(Settings)), *SETTINGS])
    return TypeError(f"got an unexpected keyword argument {name!r}{question}")


def check_exact(settings: Settings, width: int) -> None:
    """Checks that exact decoding, with `width` positions a row and pass, supports the settings."""
    if isinstance(settings.num_draft, int) and settings.num_draft >= width:
        raise refusal("num_draft", settings.num_draft, f"{width - 1} at most in exact decoding")
    if settings.num_beams > 1 or settings.delta > 0:
        name = "num_beams" if settings.num_beams > 1 else "delta"
        raise UserError(f"{name} cannot be combined with exact decoding")


def _sequence(name: str, value: Any) -> tuple:
    """The items of a setting that is a sequence; a single text or token id is one, too."""
    if name == "bad_words_ids":
        words = _items(name, value, is_listlike, "a list of lists of token ids")
        return tuple(filter(None, (_items(name, word, OFF_OR_MORE.holds, IDS) for word in words)))
    if name == "logits_processors":
        return _items(name, value, callable, "a list of callables")
    items = value if is_listlike(value) else [value]
    if name == "stop":
        expected = "a string or several, of at least one character each"
        return _items(name, items, lambda s: isinstance(s, str) and s != "", expected)
    return _items(name, items, OFF_OR_MORE.holds, IDS)


def _items(name: str, values: Any, fits: Callable[[Any], bool], expected: str) -> tuple:
    items = to_list(values)
    if items is None or not all(map(fits, items)):
        raise refusal(name, values if items is None else items, expected)
    return tuple(items)
