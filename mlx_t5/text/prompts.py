"""The prompts of a call as records, how texts are cut into several, and their checked tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral, Number
from typing import Any

from mlx_t5 import settings
from mlx_t5.errors import UserError
from mlx_t5.settings import POSITIVE, checked, is_listlike, refusal, to_list, written
from mlx_t5.text.detokenizer import StreamingDetokenizer
from mlx_t5.text.languages import checked_code
from mlx_t5.text.tokenizer import encode

PROMPT = "a text or a list of token ids"
MASK = "a list of 0 and 1, one a token id"
HIDDEN = -1  # stands for a token of a source to which nothing attends
# The maximum number of characters, and so of tokens, in a task prefix;
# "Remove all grammatical errors from this text:" has 45 characters.
PREFIX_CHARACTERS = 64
_PREFIX = re.compile(r"\s*(?P<words>[^\s.:!?][^\n.:!?]{0,62}):\s")
# A prefix with a capital letter must begin with one of these verbs, like CoEdIT's instructions.
REWRITING_VERBS = frozenset(
    "Change Clarify Correct Edit Fix Formalize Improve Make Neutralize Paraphrase Polish Proofread "
    "Remove Rephrase Reword Rewrite Shorten Simplify Summarize Translate Write".split()
)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what belongs to it alone.

    Attributes:
        source: a text or token ids; or the error because of which there is neither.
        index: the number of the prompt in its call; it selects the prompt's random stream.
        prediction: the expected output, to copy proposals from.
        seed: replaces the seed of the call.
        attention_mask: 0 for token ids to which nothing attends, and 1 for the others.
        prefix: if the source is a piece of a document, the task's prefix, with which it begins.
        parts: of a piece that was cut since it looped, the part's number at each cut.
    """

    source: str | Sequence[int] | Exception
    index: int = 0
    prediction: str | Sequence[int] | None = None
    seed: int | None = None
    attention_mask: Sequence[int] | None = None
    prefix: str | None = None
    parts: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """A text without its prefix."""
        return str(self.source)[len(self.prefix or "") :]


@dataclass(frozen=True)
class DocumentOptions:
    """How texts are cut into pieces, and what is put before them.

    Attributes:
        split: the unit of text that becomes a piece, one of `SPLITS`.
        prefix: the task's prefix, for every piece or, if nothing is cut, for every text. If None, a
            prefix is looked for at the beginning of each text to cut: one of the model's own
            prefixes, or a language tag of MADLAD-400 such as "<2de>".
        source_language: code of the text's language, such as "de", which decides where sentences
            end; "" stands for the language that the prefix names, or English.
        max_source_tokens: maximum number of tokens in a prompt, with prefix and end token; None
            stands for the model's maximum.
        file_type: ".srt" or ".vtt" for subtitles, of which only the words are decoded; ".txt" for
            another file; "" for any other text. A file is not searched for a prefix.
        target_language: code of the language into which texts are translated, with `prefix`.

    Raises:
        UserError: a value is of the wrong type or out of range.
    """

    split: str = "none"
    prefix: str | None = None
    source_language: str = ""
    max_source_tokens: int | None = None
    file_type: str = ""
    target_language: str = ""

    def __post_init__(self) -> None:
        if self.split not in settings.SPLITS:
            raise refusal("split", self.split, '"sentences", "lines" or "none"')
        if self.file_type not in ("", *settings.FILE_TYPES):
            raise refusal("file_type", self.file_type, settings.READABLE)
        if self.source_language != "":
            object.__setattr__(self, "source_language", checked_code(self.source_language))
        if self.max_source_tokens is not None:
            limit = checked("max_source_tokens", self.max_source_tokens, POSITIVE)
            object.__setattr__(self, "max_source_tokens", limit)


def split_unit(
    split: str | None, target_language: str | None, whole: Any, file_type: str = ""
) -> str:
    """What becomes a piece, one of `SPLITS`; subtitles and translations are cut unless told.

    Args:
        split: what the user says, if anything.
        target_language: the language into which texts are translated, if any.
        whole: whether several texts per prompt, log-probabilities or a prediction need whole texts.
        file_type: as in `DocumentOptions`.
    """
    if split is not None:
        return split
    cut = file_type in settings.SUBTITLES or (target_language and not whole)
    return "sentences" if cut else "none"


def numbered(prompts: Any) -> Iterator[Prompt]:
    """Texts or token ids as records, read lazily; records and errors are accepted, too."""
    if not is_listlike(prompts):
        raise UserError(f"prompts is {written(prompts)}; it must be a list, each {PROMPT}")
    numbers = enumerate(prompts)
    return (one if isinstance(one, Prompt) else Prompt(one, index) for index, one in numbers)


def checked_prompts(
    prompts: Any, seed: Any = 0, prediction: Any = None, attention_mask: Any = None
) -> tuple[list[Prompt], bool]:
    """The prompts of `generate`, and whether there is a single one (a text or token ids)."""
    sources, single = as_list(prompts)
    predictions, masks = [prediction] * len(sources), [attention_mask] * len(sources)
    if prediction is not None and not single:
        predictions = _one_each("prediction", prediction, len(sources), PROMPT)
    if attention_mask is not None and not single:
        masks = _one_each("attention_mask", attention_mask, len(sources), MASK)
    if not is_listlike(seed):
        seeds, indexes = [checked("seed", seed)] * len(sources), [*range(len(sources))]
    else:  # each prompt has the text that it has alone
        seeds, indexes = [checked("seed", own) for own in seed], [0] * len(sources)
    if len(seeds) != len(sources):
        raise UserError(f"{len(seeds)} seeds for {len(sources)} prompts; give one seed or one each")
    return list(map(Prompt, sources, indexes, predictions, seeds, masks)), single


def _one_each(name: str, given: Any, count: int, kind: str) -> list:
    values = to_list(given)
    if values is None or len(values) != count:
        raise refusal(name, given, f"a list of {count}, one a prompt, each {kind} or None")
    return values


def as_list(prompts: Any, name: str = "prompts") -> tuple[list, bool]:
    """The prompts as a list, and whether the argument was a single one (a text or token ids)."""
    if isinstance(prompts, str):
        return [prompts], True
    items = to_list(prompts)
    if items is None:
        raise refusal(name, prompts, f"{PROMPT}, or a list of those")
    single = bool(items) and isinstance(items[0], Number)
    return ([items], True) if single else (items, False)


def token_ids(
    prompt: str | Sequence[int] | Prompt, tokenizer: Any, vocab_size: int, what: str = "prompt"
) -> list[int]:
    """The tokens of one prompt, checked against the vocabulary; a text gets the end token."""
    if isinstance(prompt, Prompt):
        source, mask = prompt.source, prompt.attention_mask
        if isinstance(source, Exception):
            raise UserError(str(source))
        if isinstance(source, str) and mask is not None:
            raise UserError("attention_mask needs token ids, not a text")
        of_source = token_ids(source, tokenizer, vocab_size, what)
        return of_source if mask is None else masked(of_source, mask)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(f"a {what} is empty; write the text to work on")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start + 1} is half of a pair"
            raise UserError(f"a {what} is not valid Unicode ({where}); give whole text") from None
        if tokenizer is None:
            raise UserError(f"a text {what} needs a tokenizer; add one to the model folder")
        ids: list[Any] | None = encode(tokenizer, prompt)
    else:
        ids = to_list(prompt)
        if ids is None:
            raise UserError(f"a {what} is {written(prompt)}; it must be {PROMPT}")
    if not ids:
        raise UserError(f"a {what} is empty; give at least one token id")
    kinds = set(map(type, ids))  # few types are checked faster than many ids
    wrong = {kind for kind in kinds if kind is bool or not issubclass(kind, Integral)}
    if wrong:
        bad = written(next(token for token in ids if type(token) in wrong))
        raise UserError(f"token id {bad} is no whole number")
    ids = ids if kinds == {int} else list(map(int, ids))
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = written(next(token for token in ids if not 0 <= token < vocab_size))
        raise UserError(f"token id {bad} is outside the model's vocabulary of {vocab_size}")
    return ids


def masked(ids: Sequence[int], mask: Sequence[int]) -> list[int]:
    """The tokens, with `HIDDEN` in the place of each that the mask hides.

    T5 knows only the distances between tokens, so hidden tokens at both ends are left out.
    """
    values = to_list(mask)
    if values is None or any(is_listlike(value) or value not in (0, 1) for value in values):
        raise refusal("attention_mask", mask, MASK)
    if len(values) != len(ids):
        raise UserError(f"attention_mask has {len(values)} numbers for {len(ids)} token ids")
    visible = [i for i, value in enumerate(values) if value]
    if not visible:
        raise UserError("attention_mask hides every token of a prompt")
    inside = range(visible[0], visible[-1] + 1)
    return [ids[i] if values[i] else HIDDEN for i in inside]


def task_prefix(ids: Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """The tokens of the prefix that tells T5 what to do, with its colon; () without one.

    It is a guess, and only speed depends on it. "translate English to German:", "stsb sentence1:",
    "she said:" and "Fix grammatical errors in this sentence:" are prefixes; "She said:",
    "Question:" and "call me at 10:" are not.
    """
    if tokenizer is None:
        return ()
    segments = [*map(StreamingDetokenizer(tokenizer).add, ids[: PREFIX_CHARACTERS + 1])]
    end = guessed_prefix_end("".join(segments))
    ends = list(accumulate(map(len, segments)))
    return tuple(ids[: bisect_left(ends, end) + 1]) if end else ()


def guessed_prefix_end(text: str) -> int:
    prefix = _PREFIX.match(text)
    if not prefix:
        return 0
    words = prefix["words"].split()
    if words[-1].isdigit() or (words[0][0].isupper() and words[0] not in REWRITING_VERBS):
        return 0
    return prefix.end("words") + 1
