"""What a model is trained on, and by what it is evaluated.

A draft is trained on prompts: a line of the file is one, or an object with a "prompt" and, if the
target's answer is known already, a "completion". Equal prompts are one, so that no prompt is in
both parts. A model is fine-tuned on pairs: every prompt has a completion, or several.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_t5.errors import UserError, shown
from mlx_t5.text.prompts import token_ids

LEAST = 32  # prompts; a draft that has seen fewer has learned them by heart
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 128
LINES_NAMED = 10  # of those that cannot be used
LONGEST = 8192  # tokens of a prompt: memory is set aside for the longest, and T5 learned from 512


@dataclass(frozen=True)
class Example:
    """A prompt as tokens.

    Attributes:
        source: its tokens, EOS included.
        answer: the target's tokens, EOS included; None where the target is to be asked.
    """

    source: tuple[int, ...]
    answer: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TrainingPair:
    """A prompt and what is to be written.

    Attributes:
        source: the prompt's tokens, EOS included.
        answer: those of the completion, likewise.
        prompt: as a text.
        completion: as a text.
    """

    source: tuple[int, ...]
    answer: tuple[int, ...]
    prompt: str
    completion: str


Made = TypeVar("Made", Example, TrainingPair)


def read_examples(
    lines: Iterable[Any],
    tokenizer: Any,
    vocab_size: int,
    max_tokens: int,
    log: Callable[[str], None],
) -> list[Example]:
    """Reads prompts, and leaves out what cannot be used.

    Args:
        lines: pairs of a prompt and its completion or None, or the `UserError` of a bad line; see
            `cli.input.Lines`.
        tokenizer: of the target.
        vocab_size: V of the target.
        max_tokens: of an answer; what a completion has beyond them is cut off.
        log: gets a line about each that is left out.

    Returns:
        Examples in the order of the lines, no two with the same source.

    Raises:
        UserError: hardly any line can be used.
    """
    examples: dict[tuple[int, ...], Example] = {}

    def make(prompt: str, completion: str | None) -> Example:
        source = tuple(token_ids(prompt, tokenizer, vocab_size))
        if len(source) > LONGEST:
            raise UserError(f"it has {len(source)} tokens, and {LONGEST} are the most")
        if completion is None:
            return Example(source)
        answer = token_ids(completion, tokenizer, vocab_size, "completion")
        return Example(source, tuple(answer[:max_tokens]))

    for example in _usable(lines, make, log):
        examples.setdefault(example.source, example)
    if len(examples) < LEAST:
        raise UserError(
            f"the data has {len(examples)} different prompts that can be used; give {LEAST} at "
            "least, better thousands"
        )
    return list(examples.values())


def read_pairs(
    lines: Iterable[Any],
    tokenizer: Any,
    vocab_size: int,
    longest: tuple[int, int],
    log: Callable[[str], None],
) -> list[TrainingPair]:
    """Reads pairs, and leaves out what cannot be used.

    Args:
        lines: pairs of a prompt and its completion, or the `UserError` of a bad line.
        tokenizer: of the model.
        vocab_size: V.
        longest: tokens of a prompt, and of a completion, at most.
        log: gets a line about each that is left out.

    Returns:
        Pairs in the order of the lines, none of them twice.
    """

    def tokens(text: str, name: str, most: int) -> tuple[int, ...]:
        ids = token_ids(text, tokenizer, vocab_size, name)
        if len(ids) > most:
            raise UserError(f"its {name} has {len(ids)} tokens, and --max-seq-length is {most}")
        return tuple(ids)

    def pair(prompt: str, completion: str) -> TrainingPair:
        source = tokens(prompt, "prompt", longest[0])
        return TrainingPair(
            source, tokens(completion, "completion", longest[1]), prompt, completion
        )

    return list(dict.fromkeys(_usable(lines, pair, log)))


def _usable(
    lines: Iterable[Any], make: Callable[..., Made], log: Callable[[str], None]
) -> Iterator[Made]:
    """What `make` makes of the lines that can be used."""
    bad = 0
    for line in lines:
        reason = line
        if not isinstance(line, UserError):
            try:
                yield make(*line)
                continue
            except UserError as error:
                reason = f"the prompt {shown(line[0], 40)!r}: {error}"
        bad += 1
        if bad <= LINES_NAMED:
            log(f"left out: {reason}")
    if bad > LINES_NAMED:
        log(f"left out: {bad - LINES_NAMED} more lines")


def digest(examples: Iterable[Example | TrainingPair]) -> str:
    """A number of their tokens, by which a run knows that it has the data of the one before."""
    tokens = hashlib.sha256()
    for example in examples:
        tokens.update(repr((example.source, example.answer)).encode())
    return tokens.hexdigest()


def longest(examples: Sequence[Any]) -> tuple[int, int]:
    """Tokens of the longest source, and of the longest answer."""
    source, answer = (max(len(getattr(e, name)) for e in examples) for name in ("source", "answer"))
    return source, answer


def hold_out(examples: Sequence[Made], seed: int) -> tuple[list[Made], list[Made]]:
    """Returns what to train on, in random order, and a tenth of it at most to evaluate by.

    No prompt is in both parts.
    """
    prompts = list(dict.fromkeys(example.source for example in examples))
    shuffled = random.Random(f"split {seed}").sample(prompts, len(prompts))
    held_out = set(shuffled[: max(1, min(MOST_HELD_OUT, round(HELD_OUT_SHARE * len(prompts))))])
    places = {source: place for place, source in enumerate(shuffled)}
    ordered = sorted(examples, key=lambda example: places[example.source])
    kept = [example for example in ordered if example.source not in held_out]
    return kept, [example for example in ordered if example.source in held_out]
