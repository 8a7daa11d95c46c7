"""Reads the data on which a model is trained, and sets a part aside to evaluate the model.

A draft is trained on prompts. Each line of the file is a prompt, or an object with a "prompt" and,
if the target's answer is known already, a "completion". A repeated prompt is used once. A model is
fine-tuned on pairs of a prompt and a completion; a prompt may have several completions. The two
parts have no prompt in common.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_t5.errors import UserError, shown
from mlx_t5.text.prompts import token_ids

LEAST = 32  # minimum number of prompts; with fewer, a draft only memorizes them
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 128
LINES_NAMED = 10  # unusable lines that are reported one by one
LONGEST = 8192  # tokens of a prompt, as memory is reserved for the longest; T5 was trained on 512


@dataclass(frozen=True)
class Example:
    """A prompt, and possibly its answer, as tokens.

    Attributes:
        source: the prompt's tokens, with EOS.
        answer: the tokens of the target's answer; None if the target has not answered yet.
    """

    source: tuple[int, ...]
    answer: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TrainingPair:
    """A prompt and its completion.

    Attributes:
        source: the prompt's tokens, EOS included.
        answer: the completion's tokens, EOS included.
        prompt: the prompt's text.
        completion: the completion's text.
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
    """Reads prompts, and skips unusable lines.

    Args:
        lines: a tuple (prompt, completion) per line; the completion is None if the line has none.
            For a bad line, a `UserError`; see `cli.input.Lines`.
        tokenizer: the target's tokenizer.
        vocab_size: the size of the target's vocabulary.
        max_tokens: maximum number of tokens in an answer; longer completions are cut.
        log: a function that is given messages about the skipped lines.

    Returns:
        Examples in the order of the lines; no two have the same source.

    Raises:
        UserError: fewer than `LEAST` prompts are usable.
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
    """Reads pairs, and skips unusable lines.

    Args:
        lines: a tuple (prompt, completion) per line; for a bad line, a `UserError`.
        tokenizer: the model's tokenizer.
        vocab_size: the size of the model's vocabulary.
        longest: the maximum numbers of tokens in a prompt and in a completion.
        log: a function that is given messages about the skipped lines.

    Returns:
        Pairs in the order of the lines, without duplicates.
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
    """Yields `make(prompt, completion)` for each usable line, and logs the other lines."""
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
    """Returns a digest of the examples' tokens, by which a resumed run recognizes its data."""
    tokens = hashlib.sha256()
    for example in examples:
        tokens.update(repr((example.source, example.answer)).encode())
    return tokens.hexdigest()


def longest(examples: Sequence[Any]) -> tuple[int, int]:
    """Returns the lengths in tokens of the longest source and of the longest answer."""
    source, answer = (max(len(getattr(e, name)) for e in examples) for name in ("source", "answer"))
    return source, answer


def hold_out(examples: Sequence[Made], seed: int) -> tuple[list[Made], list[Made]]:
    """Splits examples at random into a part to train on and a part to evaluate with.

    The second part has about a tenth of the prompts, at least 1 and at most `MOST_HELD_OUT`. No
    prompt is in both parts. Both parts are in random order.
    """
    prompts = list(dict.fromkeys(example.source for example in examples))
    shuffled = random.Random(f"split {seed}").sample(prompts, len(prompts))
    held_out = set(shuffled[: max(1, min(MOST_HELD_OUT, round(HELD_OUT_SHARE * len(prompts))))])
    places = {source: place for place, source in enumerate(shuffled)}
    ordered = sorted(examples, key=lambda example: places[example.source])
    training = [example for example in ordered if example.source not in held_out]
    return training, [example for example in ordered if example.source in held_out]
