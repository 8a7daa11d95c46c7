"""The prompts that a draft is trained on, and those by which it is evaluated.

A line of the file is a prompt, or an object with a "prompt" and, if the target's answer is known
already, a "completion". Equal prompts are one, so that no prompt is in both parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
    bad = 0
    for line in lines:
        try:
            if isinstance(line, UserError):
                raise line
            prompt, completion = line
            example = _example(prompt, completion, tokenizer, vocab_size, max_tokens)
        except UserError as error:
            bad += 1
            if bad <= LINES_NAMED:
                log(f"left out: {error}")
            continue
        examples.setdefault(example.source, example)
    if bad > LINES_NAMED:
        log(f"left out: {bad - LINES_NAMED} more lines")
    if len(examples) < LEAST:
        raise UserError(
            f"the data has {len(examples)} different prompts that can be used; give {LEAST} at "
            "least, better thousands"
        )
    return list(examples.values())


def _example(
    prompt: str, completion: str | None, tokenizer: Any, vocab_size: int, max_tokens: int
) -> Example:
    try:
        source = token_ids(prompt, tokenizer, vocab_size)
        if len(source) > LONGEST:
            raise UserError(f"it has {len(source)} tokens, and {LONGEST} are the most")
        if completion is None:
            return Example(tuple(source))
        answer = token_ids(completion, tokenizer, vocab_size, "completion")[:max_tokens]
    except UserError as error:
        raise UserError(f"the prompt {shown(prompt, 40)!r}: {error}") from None
    return Example(tuple(source), tuple(answer))


def split(examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Returns the examples to train on, in random order, and the held-out ones."""
    shuffled = random.Random(f"split {seed}").sample(list(examples), len(examples))
    held_out = min(MOST_HELD_OUT, round(HELD_OUT_SHARE * len(shuffled)))
    return shuffled[held_out:], shuffled[:held_out]
