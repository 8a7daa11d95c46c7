"""Reads the data on which a model is trained, and sets a part aside to evaluate the model.

A draft is trained on prompts. Each line of the file is a prompt, or an object with a "prompt" and,
if the target's answer is known already, a "completion". A repeated prompt is used once. A model is
fine-tuned on pairs of a prompt and a completion; a prompt may have several completions, and equal
pairs count as often as they occur. The two parts have no prompt in common.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_t5.errors import UserError, brief
from mlx_t5.text.detokenizer import decode
from mlx_t5.text.prompts import token_ids

LEAST = 32  # minimum number of prompts; with fewer, a draft only memorizes them
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 128
LINES_NAMED = 10  # unusable lines that are reported one by one
LONGEST = 8192  # tokens of a prompt, as memory is reserved for the longest; T5 was trained on 512


@dataclass(frozen=True)
class Example:
    """A prompt as tokens with EOS, and the target's answer if it is known."""

    source: tuple[int, ...]
    answer: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TrainingPair:
    """A pair as tokens with EOS and as texts; the completion is as the tokens write it."""

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
    log: Callable[[str], object],
) -> list[Example]:
    examples: dict[tuple[int, ...], Example] = {}
    counts: Counter[str] = Counter()

    def make(prompt: str, completion: str | None) -> Example:
        source = tuple(token_ids(prompt, tokenizer, vocab_size))
        if len(source) > LONGEST:
            raise UserError(f"it has {len(source)} tokens, and {LONGEST} are the most")
        if completion is None:
            return Example(source)
        answer = token_ids(completion, tokenizer, vocab_size, "completion")
        if len(answer) > max_tokens:
            counts["completions are cut to --max-tokens"] += 1
        return Example(source, tuple(answer[:max_tokens]))

    for example in _usable(lines, make, log):
        if example.source in examples:
            counts["repeated prompts are used once"] += 1
        else:
            examples[example.source] = example
    _report(counts, log)
    if len(examples) < LEAST:
        cause = f"the data has {len(examples)} different prompts that can be used"
        raise UserError(f"{cause}; give {LEAST} at least, better thousands")
    return list(examples.values())


def read_pairs(
    lines: Iterable[Any],
    tokenizer: Any,
    vocab_size: int,
    longest: tuple[int, int],
    log: Callable[[str], object],
) -> list[TrainingPair]:
    counts: Counter[str] = Counter()
    changed: list[tuple[str, str]] = []  # completions, and what their tokens write

    def pair(prompt: str, completion: str) -> TrainingPair:
        source = token_ids(prompt, tokenizer, vocab_size)
        answer = token_ids(completion, tokenizer, vocab_size, "completion")
        if len(answer) > longest[1]:
            cause = f"its completion has {len(answer)} tokens"
            raise UserError(f"{cause}, and --max-seq-length is {longest[1]}")
        if len(source) > longest[0]:
            counts[f"prompts are cut to {longest[0]} tokens (--max-seq-length)"] += 1
            source = source[: longest[0] - 1] + source[-1:]  # the last token is EOS
        written = decode(tokenizer, answer)
        if written.strip() != completion.strip():
            changed.append((completion, written))
        return TrainingPair(tuple(source), tuple(answer), prompt, written)

    pairs = list(_usable(lines, pair, log))
    counts["pairs occur more than once and are kept"] = len(pairs) - len(set(pairs))
    _report(counts, log)
    if changed:
        texts = [brief(text, 80) for text in changed[0]]
        log(
            f"warning: {len(changed)} of {len(pairs)} completions have characters that this "
            f"tokenizer cannot write: {texts[0]!r} becomes {texts[1]!r}; the model learns to write "
            "that, and exact match and chrF compare with it"
        )
    return pairs


def _report(counts: Counter[str], log: Callable[[str], object]) -> None:
    for what, count in (+counts).items():  # the positive ones
        log(f"{count} {what}")


def _usable(
    lines: Iterable[Any], make: Callable[..., Made], log: Callable[[str], object]
) -> Iterator[Made]:
    reasons = []
    for line in lines:
        if isinstance(line, UserError):
            reasons.append(str(line))
            continue
        try:
            yield make(*line)
        except UserError as error:
            reasons.append(f"the prompt {brief(line[0], 40)!r}: {error}")
    for reason in reasons[:LINES_NAMED]:
        log(f"left out: {reason}")
    if len(reasons) > LINES_NAMED:
        log(f"left out: {len(reasons) - LINES_NAMED} more lines")


def longest(examples: Sequence[Any]) -> tuple[int, int]:
    return max(len(e.source) for e in examples), max(len(e.answer) for e in examples)


def hold_out(examples: Sequence[Made], seed: int) -> tuple[list[Made], list[Made]]:
    """Splits examples at random into a part to train on and a tenth, at most `MOST_HELD_OUT`.

    No prompt is in both parts.
    """
    prompts = list(dict.fromkeys(example.source for example in examples))
    shuffled = random.Random(f"split {seed}").sample(prompts, len(prompts))
    count = max(1, min(MOST_HELD_OUT, round(HELD_OUT_SHARE * len(prompts))))
    places = {source: place for place, source in enumerate(shuffled)}
    ordered = sorted(examples, key=lambda example: places[example.source])
    held_out = [example for example in ordered if places[example.source] < count]
    return [example for example in ordered if places[example.source] >= count], held_out
